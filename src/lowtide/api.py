"""``lowtide.adapt`` and ``lowtide.plan``: the two verbs that use several packages.

Imports are inside the functions: a plan of a Trace needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lowtide.errors import PlanError
from lowtide.units import parse_bytes

if TYPE_CHECKING:
    from torch import nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from lowtide.adaptive.session import Adaptive
    from lowtide.cost.device import Device
    from lowtide.planner.pipeline import Pipeline
    from lowtide.planner.plan import Plan
    from lowtide.policy import Policy

__all__ = ["adapt", "plan"]


def adapt(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    budget: int | str = "auto",
    profiling_steps: int | None = None,
    rescue: bool = True,
    watch: Literal["suspicion", "always"] = "suspicion",
    swap: bool = True,
    policy: Policy | Plan | str | Path | None = None,
    scaler: GradScaler | None = None,
    layers: str | None = None,
    pipeline: Pipeline | None = None,
    stage: int = 0,
    directory: str | Path | None = None,
    verbose: bool = True,
) -> Adaptive:
    """Make a training loop fit its device, at the highest speed that fits.

    The first steps recompute every layer and are measured, ``profiling_steps`` of them or as few as it takes; then the
    fastest Policy whose memory is within ``budget`` is applied. ``"auto"`` is all that the device has. Where batches
    differ in shape there is a Policy for each. On OOM, saved tensors are offloaded to the host and the operator, or the
    step, is retried, unless ``rescue`` is False. Operators are watched for it in steps that give a reason, such as a
    batch larger than any before; ``watch="always"`` watches them in all steps, which takes about 40 microseconds for
    each. ``policy`` holds decisions that the plan must not change. What was measured and planned is saved in
    ``directory``.

    Pass every optimizer that steps, as a list if there are several, and the ``scaler`` of a loop that has one and
    unscales gradients before the optimizer's step. A model has one run: a second ``adapt`` of the same
    model or optimizer, or of a part of it, removes the first and says so.

    Every rank of a process group calls this. In a pipeline ``model`` is the rank's part, or the list of its parts,
    ``pipeline`` says which layers are where, and ``stage`` which of them are here.

    Around a loop, where each ``optimizer.step()`` ends a step::

        with lowtide.adapt(model, optimizer):
            for batch in batches:
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    Or step by step, which also allows a whole step to be retried on OOM::

        run = lowtide.adapt(model, optimizer)
        for batch in batches:
            loss = run.step(lambda: train_step(batch))
    """
    from lowtide.adaptive.session import Adaptive
    from lowtide.adaptive.settings import AdaptSettings
    from lowtide.report.adapt import print_report, say
    from lowtide.runtime.apply import policy_of

    settings = AdaptSettings(
        profiling_steps=profiling_steps,
        budget=None if budget == "auto" else parse_bytes(budget),
        rescue=rescue,
        watch=watch,
        swap=swap,
        verbose=verbose,
    )
    run = Adaptive(
        list(model) if isinstance(model, Sequence) else [model],
        [] if optimizer is None else list(optimizer) if isinstance(optimizer, Sequence) else [optimizer],
        settings,
        fixed=None if policy is None else policy_of(policy),
        scaler=scaler,
        layers=layers,
        pipeline=pipeline,
        stage=stage,
        directory=Path(directory) if directory is not None else None,
        say=say,
        report=print_report,
    )
    try:
        run.prepare()  # the first step has to survive OOM as well, also where the caller runs the steps
    except BaseException:
        run.remove()
        raise
    return run


def plan(
    model: Any,
    run: Callable[[], Any] | None = None,
    *,
    budget: int | str,
    device: Device | str,
    pipeline: Pipeline | None = None,
    swap: bool = True,
    recompute: bool = True,
    host_memory: int | None = None,
    fixed: Policy | None = None,
) -> Plan:
    """The fastest Policy of ``model`` whose memory fits ``budget`` on ``device``.

    ``model`` is a Trace, or a ``torch.nn.Module`` with ``run``, which does one forward and returns the loss; the model
    is then run four times: with fake parameters nothing is computed. ``device`` is a name such as ``"h100"``, the file
    of a calibrated one, or a Device. Nothing is applied:

    ``plan = lowtide.plan(model, lambda: model(tokens, labels=tokens).loss, budget="60GiB", device="h100")``;
    ``lowtide.apply(model, plan.policy)``
    """
    from lowtide.planner.make import make_plan
    from lowtide.trace.trace import Trace

    if isinstance(model, Trace):
        trace = model
    elif run is None:
        raise PlanError(
            f"a {type(model).__name__} is planned for by running it: give run=, a function that does one forward and"
            " returns the loss, or give a Trace"
        )
    else:
        from lowtide.trace.capture import capture

        # Its seconds are those of the device that it ran on; the planned device's come from its table.
        trace = capture(model, run, rounds=0).without_seconds()
    return make_plan(
        trace, budget, device, pipeline, swap=swap, recompute=recompute, host_memory=host_memory, fixed=fixed
    )

"""``lowtide.adapt`` and ``lowtide.plan``: the two verbs that use several packages.

Imports are inside the functions: a plan of a Trace needs no torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lowtide.errors import InfeasibleError, PlanError
from lowtide.units import parse_budget, parse_bytes

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from lowtide.adaptive.session import Adaptive
    from lowtide.cost.device import Device
    from lowtide.planner.pipeline import Pipeline
    from lowtide.planner.plan import Plan
    from lowtide.policy import Policy
    from lowtide.trace.trace import Trace

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
        budget=None if budget == "auto" else parse_budget(budget),
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
    model: nn.Module | Trace,
    run: Callable[[], Any] | None = None,
    *,
    budget: int | str = "auto",
    reserve: int | str | None = None,
    device: Device | torch.device | str,
    expandable_segments: bool = False,
    pipeline: Pipeline | None = None,
    layers: str | None = None,
    swap: bool = True,
    recompute: bool = True,
    host_memory: int | str | None = None,
    fixed: Policy | None = None,
    must_fit: bool = True,
) -> Plan:
    """The fastest Policy of ``model`` whose memory fits ``budget`` on ``device``.

    ``model`` is a Trace, or a ``torch.nn.Module`` with ``run``, which does one forward and returns the loss, or
    what has the loss: an object with ``.loss``, a tuple that begins with it. The model is then run four times: with
    fake parameters nothing is computed. ``device`` is a name such as ``"h100"``, the file of a calibrated one, a
    Device, or torch's name for the one of this machine, such as ``"cuda"``. ``budget`` is a size such as
    ``"60GiB"``; ``"auto"`` is the device's memory less ``reserve``, which is what the driver, process groups and
    workspaces take: unless given, what the device's table assumes. ``expandable_segments`` says that torch's allocator
    has that setting in the run, which then reserves less. What the optimizer holds is not in a model's step:
    leave room for it, which is twice the parameters for AdamW, or plan from the Trace of an adaptive run. ``layers``
    names the module that holds the layers, where a model has several stacks: one is planned, and a warning says which
    are not.

    If nothing fits, InfeasibleError is raised, with the plan that needs least as its ``plan``; with ``must_fit=False``
    that plan is returned, and its ``feasible`` is False. Nothing is applied:

    ``plan = lowtide.plan(model, lambda: model(tokens, labels=tokens), budget="60GiB", device="h100")``;
    ``lowtide.apply(model, plan.policy)``
    """
    from lowtide.planner.budget import budget_of
    from lowtide.planner.make import make_plan

    size = None if budget == "auto" else parse_budget(budget)
    kept_back = None if reserve is None else parse_budget(reserve, "reserve")
    target, trace = _device(device), _trace(model, run, layers)
    if expandable_segments:
        target = replace(target, expandable_segments=True)
    made = make_plan(
        trace,
        budget_of(target, trace, pipeline, budget=size, reserve=kept_back),
        target,
        pipeline,
        swap=swap,
        recompute=recompute,
        host_memory=None if host_memory is None else parse_bytes(host_memory),
        fixed=fixed,
    )
    if not trace.optimizer_name:
        made = replace(made, notes=(*made.notes, "the optimizer's states are not counted: leave room for them"))
    if must_fit and not made.feasible:
        raise InfeasibleError(
            f"{made.notes[0]}. The plan that needs least is this error's `plan`; must_fit=False returns it", made
        )
    return made


def _device(device: Device | torch.device | str) -> Device:
    from lowtide.cost.device import Device
    from lowtide.cost.devices import find_device, is_torch_device

    if isinstance(device, Device):
        return device
    if isinstance(device, (str, Path)) and not is_torch_device(str(device)):
        return find_device(device)
    from torch import device as torch_device

    from lowtide.cost.present import present_device

    if not isinstance(device, (str, torch_device)):
        raise PlanError(f'a device is a name such as "h100", a file, a Device or a torch.device; found {device!r:.60}')
    return present_device(device)


def _trace(model: nn.Module | Trace, run: Callable[[], Any] | None, layers: str | None) -> Trace:
    from lowtide.trace.trace import Trace

    if isinstance(model, Trace):
        if run is not None or layers is not None:
            raise PlanError("a Trace is planned for as it is: leave run= and layers= out, or give the model")
        return model
    from torch import nn

    from lowtide.trace.capture import capture
    from lowtide.trace.stacks import is_uncovered

    if not isinstance(model, nn.Module):
        raise PlanError(
            f"a {type(model).__name__} cannot be planned for: give a torch.nn.Module with run=, or a Trace, such as"
            " Trace.load(file); `lowtide plan` takes names and files"
        )
    if not callable(run):
        raise PlanError(
            f"a {type(model).__name__} is planned for by running it: give run=, a function that does one forward and"
            f" returns the loss, or give a Trace; found run={run!r:.60}"
        )
    # Its seconds are those of the device that it ran on; the planned device's come from its table.
    trace = capture(model, run, layers=layers, rounds=0).without_seconds()
    for note in filter(is_uncovered, trace.notes):
        warnings.warn(note, stacklevel=3)
    return trace

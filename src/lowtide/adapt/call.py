"""``lowtide.adapt``: one line that makes a training loop fit, and then fast."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from lowtide.adapt.session import Adaptive
from lowtide.adapt.settings import PROFILING_STEPS, AdaptSettings
from lowtide.units import parse_bytes

if TYPE_CHECKING:
    from lowtide.plan.pipeline import Pipeline
    from lowtide.policy import Policy

__all__ = ["adapt"]


def adapt(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    budget: int | str = "auto",
    profiling_steps: int = PROFILING_STEPS,
    rescue: bool = True,
    swap: bool = True,
    policy: Policy | None = None,
    layers: str | None = None,
    pipeline: Pipeline | None = None,
    stage: int = 0,
    directory: str | Path | None = None,
    verbose: bool = True,
) -> Adaptive:
    """Make a training loop fit its device, at the highest speed that fits.

    The first ``profiling_steps`` steps recompute every layer and are measured; then the fastest Policy whose memory is
    within ``budget`` is put to work. ``"auto"`` is all that the device gives. Where an allocation fails, tensors go to
    the host and the operator, or the step, is repeated, unless ``rescue`` is False. ``policy`` holds decisions that
    stay as they are. What was measured and planned is saved in ``directory``.

    Pass every optimizer that steps, as a list if there are several. A model has one run: a second ``adapt`` of the same
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

    Or step by step, which also allows a step to be repeated as a whole::

        run = lowtide.adapt(model, optimizer)
        for batch in batches:
            loss = run.step(lambda: train_step(batch))
    """
    settings = AdaptSettings(
        profiling_steps=profiling_steps,
        budget=None if budget == "auto" else parse_bytes(budget),
        rescue=rescue,
        swap=swap,
        verbose=verbose,
    )
    # By name: what is shown stands above what is done.
    terminal = import_module("lowtide.report.adapt")
    run = Adaptive(
        [model] if isinstance(model, nn.Module) else model,
        [] if optimizer is None else list(optimizer) if isinstance(optimizer, Sequence) else [optimizer],
        settings,
        fixed=policy,
        layers=layers,
        pipeline=pipeline,
        stage=stage,
        directory=Path(directory) if directory is not None else None,
        say=terminal.say,
        report=terminal.print_report,
    )
    try:
        run.prepare()  # whoever runs the steps, the first is to come through as well
    except BaseException:
        run.remove()
        raise
    return run

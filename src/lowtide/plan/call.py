"""``lowtide.plan``: one call from a model to the fastest Policy that fits."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lowtide.errors import PlanError
from lowtide.plan.make import make_plan
from lowtide.trace.trace import Trace

if TYPE_CHECKING:
    from lowtide.cost.device import Device
    from lowtide.plan.pipeline import Pipeline
    from lowtide.plan.plan import Plan
    from lowtide.policy import Policy

__all__ = ["plan"]


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
    if isinstance(model, Trace):
        trace = model
    elif run is None:
        raise PlanError(
            f"a {type(model).__name__} is planned for by running it: give run=, a function that does one forward and"
            " returns the loss, or give a Trace"
        )
    else:
        # By name: the solver itself never needs torch, and whoever has a model has it already.
        # Its seconds are the device's that it ran on; those of the one that is planned for come from its table.
        trace = import_module("lowtide.trace.capture").capture(model, run, rounds=0).without_seconds()
    return make_plan(
        trace, budget, device, pipeline, swap=swap, recompute=recompute, host_memory=host_memory, fixed=fixed
    )

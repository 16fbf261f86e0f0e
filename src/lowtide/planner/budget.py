"""How much of a device's memory a run may reserve, unless its user says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lowtide.cost.device import Device
from lowtide.errors import PlanError
from lowtide.planner.pipeline import Pipeline
from lowtide.trace.trace import Kernel, Trace
from lowtide.units import format_bytes

__all__ = ["Budget", "Groups", "budget_of", "check_given", "process_groups"]


class Groups(NamedTuple):
    """The process groups of a run that one rank is in."""

    number: int = 0
    all_to_all: int = 0
    """How many of them have all-to-alls."""


class Budget(NamedTuple):
    """The bytes of each device that a plan may reserve, and what was assumed for that."""

    bytes: int
    note: str


def budget_of(
    device: Device,
    trace: Trace,
    pipeline: Pipeline | None = None,
    *,
    budget: int | None = None,
    reserve: int | None = None,
) -> Budget:
    """``budget`` if it is given; otherwise the device's memory less ``reserve``, or less what its table says that a run
    with the process groups of ``trace`` takes.

    PlanError if both are given, or if nothing is left.
    """
    check_given(budget, reserve)
    groups = process_groups(trace, pipeline)
    has, takes = format_bytes(device.capacity), device.reserve.total(*groups)
    if budget is not None:
        left = format_bytes(max(0, device.capacity - takes))
        return Budget(
            budget,
            f"the budget was given; of the {has} of {device.name}, {left} are left after {_taken(device, groups)}",
        )
    left_over = device.capacity - (takes if reserve is None else reserve)
    if left_over <= 0:
        raise PlanError(
            f"nothing is left of the {has} of {device.name}: {format_bytes(takes if reserve is None else reserve)} are"
            " reserved for other things than tensors; give a smaller --reserve (reserve=), or --budget (budget=)"
        )
    what = _taken(device, groups) if reserve is None else f"a reserve of {format_bytes(reserve)}, which was given"
    return Budget(left_over, f"the budget is the {has} of {device.name} less {what}")


def check_given(budget: int | None, reserve: int | None) -> None:
    """PlanError if both are given."""
    if budget is not None and reserve is not None:
        raise PlanError(
            "a budget is what is left of the device's memory after the reserve: give one of them, --budget (budget=) or"
            " --reserve (reserve=)"
        )


def process_groups(trace: Trace, pipeline: Pipeline | None = None) -> Groups:
    """The groups that a step's collectives use, and one for what pipeline stages send to each other."""
    pipeline = pipeline or trace.pipeline
    found: dict[tuple[int, int], bool] = {}
    for kernel in _kernels(trace):
        if kernel.ranks > 1:
            group = (kernel.ranks, kernel.stride)
            found[group] = found.get(group, False) or "alltoall" in kernel.kind.replace("_", "")
    staged = pipeline is not None and pipeline.stages > 1
    return Groups(len(found) + staged, sum(found.values()))


def _kernels(trace: Trace) -> Iterable[Kernel]:
    for part in (trace.before, *trace.parts, trace.after, trace.optimizer):
        yield from part.kernels


def _taken(device: Device, groups: Groups) -> str:
    """What others take, in words."""
    reserve = device.reserve
    parts = [f"{format_bytes(reserve.driver)} for the driver", f"{format_bytes(reserve.workspace)} for workspaces"]
    for count, each, with_what in (
        (groups.number - groups.all_to_all, reserve.communication, ""),
        (groups.all_to_all, reserve.all_to_all, " with all-to-alls"),
    ):
        if count:
            which = "the process group" if count == 1 else f"each of {count} process groups"
            parts.append(f"{format_bytes(each)} for {which}{with_what}")
    return f"{format_bytes(reserve.total(*groups))}, which is assumed: {', '.join(parts)}"

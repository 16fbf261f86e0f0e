"""A bound on the time of a step: no Policy within a budget takes less, by the simulator's own clocks and bytes.

[Note: why it is a bound]
A Policy adds kernels and copies to the step that keeps everything, and takes none away; the clocks only move forward.
So no step is shorter than that one. Look at the moment at which that step holds most. The program comes by the same
point under every Policy, and there holds the same tensors but those whose operator is recomputed or swapped and the
inputs of layers that are swapped. To fit, a Policy has to free there at least what is above the budget, and that takes:

- for each operator that is recomputed, the kernels of the calls that made what it frees, once for a micro-batch;
- for what is swapped, the link: computation waits for the copy before it frees the source, so all of these copies are
  over at that moment, and they are reloaded after it.

Each of these is linear in what is freed. An operator may be freed in a part of its layers here, and everything that a
Policy needs besides is left out, so the smallest time with these rows is never more than that of a Policy. Bytes are
those that tensors ask for: an allocator reserves no less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from lowtide.cost.device import Device
from lowtide.planner.casts import without_casts
from lowtide.planner.linear_program import LinearProgram
from lowtide.planner.pipeline import Pipeline
from lowtide.planner.simulation import Simulation, StageSimulation
from lowtide.trace.trace import Kernel, Part, Trace

__all__ = ["least_seconds"]

_MIB = 1 << 20
_MILLI = 1e-3
SLACK = 1e-9
"""The share by which a bound is lowered, for sums in another order than the simulator's."""


def least_seconds(
    trace: Trace,
    pipeline: Pipeline,
    device: Device,
    kept: Simulation,
    budget: int,
    seconds: Callable[[Kernel], float],
    *,
    swap: bool = True,
    recompute: bool = True,
) -> float:
    """Seconds of a step that no Policy within ``budget`` is below; infinite if none is within it.

    ``kept`` keeps everything. Those of its stages that were simulated with details are looked at.
    """
    most = kept.seconds
    for stage in kept.stages:
        if stage.shares and stage.peak_at is not None:
            found = _of_stage(trace, pipeline, device, kept, stage, budget, seconds, swap=swap, recompute=recompute)
            most = max(most, found * (1 - SLACK))
    return most


@dataclass
class _Item:
    """What one operator of some layers, or their inputs, may free at the moment."""

    bytes: int = 0
    """In all micro-batches that are in flight."""
    seconds: float = 0.0
    """The kernels that a micro-batch replays if all of it is recomputed."""
    recomputed: bool = True
    """Whether it can be; else only swapped."""


def _of_stage(
    trace: Trace,
    pipeline: Pipeline,
    device: Device,
    kept: Simulation,
    stage: StageSimulation,
    budget: int,
    seconds: Callable[[Kernel], float],
    *,
    swap: bool,
    recompute: bool,
) -> float:
    needed = sum(share.bytes for share in stage.shares) - budget
    if needed <= 0:
        return kept.seconds
    items = _items(trace, pipeline, stage, seconds)
    most = sum(item.bytes for item in items if swap or (recompute and item.recomputed))
    if most < needed:
        return float("inf")
    model = LinearProgram()
    time = model.variable(0.0, float("inf"), cost=1.0)  # in milliseconds, as sizes are in mebibytes
    freed: dict[int, float] = {}
    again: dict[int, float] = {}
    copied: dict[int, float] = {}
    """Mebibytes that are on the host at the moment."""
    for item in items:
        share: dict[int, float] = {}
        if recompute and item.recomputed:
            one = model.variable(0.0, 1.0)
            share[one] = freed[one] = item.bytes / _MIB
            again[one] = item.seconds / _MILLI
        if swap:
            one = model.variable(0.0, 1.0)
            share[one] = freed[one] = copied[one] = item.bytes / _MIB
        if len(share) > 1:
            model.row(dict.fromkeys(share, 1.0), 0.0, 1.0)
    model.row(freed, needed / _MIB, float("inf"))
    for least, of_again, of_copies in _rows(pipeline, device, kept, stage):
        terms = {time: 1.0}
        terms |= {one: -of_again * value for one, value in again.items() if of_again}
        terms |= {one: -of_copies * value * _MIB / _MILLI for one, value in copied.items() if of_copies}
        model.row(terms, least / _MILLI, float("inf"))
    if model.solve() is None:
        return kept.seconds  # the solver gave up
    return model.bound * _MILLI


def _rows(
    pipeline: Pipeline, device: Device, kept: Simulation, stage: StageSimulation
) -> Iterable[tuple[float, float, float]]:
    """What the step's time is at least: so many seconds, so often what is recomputed, and so much for a copied byte."""
    out, back = (
        1 / (rate * device.efficiency.get(name, 1.0))
        for rate, name in ((device.link_out, "link_out"), (device.link_in, "link_in"))
    )
    times = pipeline.micro_batches
    yield kept.seconds, 0.0, 0.0
    yield stage.busy + _around(pipeline, kept, stage.stage), times, 0.0
    if times == 1 and pipeline.stages == 1:
        assert stage.peak_at is not None
        moment = stage.peak_at.time
        later = [span for span in stage.spans if span.lane == "compute" and span.start >= moment]
        before_backward = not any(
            span.kind == "backward" and span.layer is not None and span.start < moment for span in stage.spans
        )
        yield sum(span.seconds for span in later), float(before_backward), out
        yield moment, 0.0, back
    else:
        of_each = times / max(stage.in_flight, 1)  # a micro-batch copies its part of what is on the host at the moment
        yield 0.0, 0.0, of_each * out
        yield 0.0, 0.0, of_each * back


def _around(pipeline: Pipeline, kept: Simulation, stage: int) -> float:
    """Until a stage begins and after it has ended, a micro-batch passes the stages before it; then comes the optimizer.

    So it is where a stage has one chunk and ends with a backward. Other schedules count nothing here.
    """
    stages = kept.stages
    if pipeline.schedule not in ("gpipe", "1f1b") or len(stages) != pipeline.stages:
        return 0.0
    before = sum((one.busy - one.optimizer) / pipeline.micro_batches for one in stages[:stage])
    return before + stages[0].optimizer - stages[stage].optimizer


def _items(trace: Trace, pipeline: Pipeline, stage: StageSimulation, seconds: Callable[[Kernel], float]) -> list[_Item]:
    """What decisions may free at the moment. Layers that do the same are one item."""
    split = pipeline.stages * pipeline.chunks > 1
    again = [_seconds_again(without_casts(part) if split else part, seconds) for part in trace.parts]
    items: dict[tuple[int, str], _Item] = {}
    layers: dict[tuple[int, str], set[int]] = {}
    for share in stage.shares:
        if share.what == "boundaries":
            held = _holds_input(trace, share.layer)
            item = items.setdefault((-1, "held" if held else ""), _Item(recomputed=not held))
        elif share.what == "activations" and share.layer is not None:
            key = (trace.layers[share.layer], share.operator)
            item = items.setdefault(key, _Item())
            layers.setdefault(key, set()).add(share.layer)
        else:
            continue
        item.bytes += share.bytes
    for (place, operator), own in layers.items():
        items[place, operator].seconds = again[place].get(operator, 0.0) * len(own)
    return list(items.values())


def _holds_input(trace: Trace, maker: int | None) -> bool:
    """Whether what comes after a layer saves what that gives it, which then only a swap can free."""
    following = 0 if maker is None else maker + 1
    part = trace.parts[trace.layers[following]] if following < len(trace.layers) else trace.after
    return any(pack.source == "boundary" and pack.value == part.input for pack in part.packs)


def _seconds_again(part: Part, seconds: Callable[[Kernel], float]) -> Mapping[str, float]:
    """By operator: the kernels that are surely replayed if all that it saved is recomputed, alone or with the layer."""
    last = max((place for place, (what, _) in enumerate(part.forward) if what == "save"), default=-1)
    makers: dict[int, int] = {}
    savers: dict[int, int] = {}
    of_call: dict[int, float] = {}
    running = -1
    for place, (what, number) in enumerate(part.forward):
        if what in ("call", "end"):
            running = number if what == "call" else -1
        elif what == "make":
            makers[number] = running
        elif what == "save":
            savers[number] = running
        elif what == "run" and running >= 0 and place < last:  # a layer is recomputed until it has saved everything
            of_call[running] = of_call.get(running, 0.0) + seconds(part.kernels[number])
    used = {number for what, number in part.backward if what == "use"}
    calls: dict[str, set[int]] = {}
    for number in used:
        pack = part.packs[number]
        found = {makers.get(pack.value, -1)}
        if pack.cast and savers[number] >= 0:  # made where it is saved, of what the operator returned
            given = part.calls[savers[number]].inputs
            found = {makers.get(value, -1) for value in given if part.values[value].owner == pack.owner}
        own = {call for call in found if call >= 0 and part.calls[call].operator == pack.owner}
        if len(found) == len(own) == 1:
            calls.setdefault(pack.owner, set()).update(own)
    return {operator: sum(of_call.get(call, 0.0) for call in own) for operator, own in calls.items()}

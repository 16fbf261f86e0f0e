"""What the solver is asked: the bytes and seconds of each decision, and the moments at which memory is at its most.

[Note: the model]
A layer is decided in one of two ways. As a whole it is recomputed from its input, which is kept or swapped. Otherwise
each operator is kept, swapped or recomputed:

- what is kept holds the storages that backward asks for;
- what is swapped holds nothing, and its bytes pass both links once in each micro-batch, in time that the computation
  leaves, or at the cost of a wait;
- what is recomputed holds nothing and takes the time of its forward again. It needs its inputs: those whose owner
  is recomputed too are rebuilt with it, those that backward asks for are there, and others are held for it alone.

A stage holds that for each of its layers, as many times as micro-batches are in flight. Added to it are what is always
there, and what the running layer needs temporarily. Backward begins with the last layer, so what every layer of the
chunk frees is back at that moment. The temporary need is modelled for a layer that keeps everything and for
one that is recomputed as a whole; what the allocator loses, and what copies under way occupy, is not modelled. The
simulator knows all of these, and the plan is repaired with what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from lowtide.cost.device import Device
from lowtide.planner.pipeline import Pipeline
from lowtide.planner.schedule import Action, actions, position
from lowtide.policy import Decision, Keep, Recompute, Resolution, Swap
from lowtide.trace.layout import Layout
from lowtide.trace.trace import Event, Kernel, Part, Trace

__all__ = [
    "Case",
    "Group",
    "Input",
    "LayerCost",
    "OperatorCost",
    "StageProblem",
    "Storage",
    "layer_cost",
    "stage_problems",
]

Seconds: TypeAlias = Callable[[Kernel], float]


class Storage(NamedTuple):
    """A storage that backward asks for."""

    size: int
    first: int
    """The place of the first operator that saves it: when it can leave."""
    last: int
    """The place of the last one that does, which is the first to want it back."""


class OperatorCost(NamedTuple):
    """What the decisions for one operator cost."""

    name: str
    storages: tuple[Storage, ...]
    """What it holds where it is kept, and what passes the links where it is swapped."""
    held: int
    """Their bytes."""
    seconds: float
    """The time to recompute it."""
    repeatable: bool
    backward: float = 0.0
    """The time of its backward."""


class Input(NamedTuple):
    """A storage that backward does not need, and that the recompute of some operators would."""

    size: int
    owner: int | None
    """The place of the operator that wrote it: if that is recomputed too, the storage need not be held."""
    readers: tuple[int, ...]
    """The places of the operators that need it."""


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """A part of the Trace as the solver sees it. See [Note: the model]."""

    operators: tuple[OperatorCost, ...]
    inputs: tuple[Input, ...]
    boundary: int
    """The bytes of the layer's input that backward asks for, or of its cast."""
    given: int
    """The bytes of the layer's input: what a layer that is recomputed as a whole holds."""
    fixed: int
    """Bytes that are held unless the whole layer is recomputed: integers and booleans."""
    passing: int
    """The most that its backward needs in addition to what is held, where everything is kept."""
    passing_whole: int
    """The same where it is recomputed as a whole."""
    forward: float
    """Seconds of its forward."""
    again: float
    """Seconds to recompute it as a whole: until the last tensor is saved."""
    backward: float
    """Seconds of its backward."""
    gradients: int
    """The bytes of its parameters' gradients."""
    output: int
    """The bytes of its output."""
    boundary_storages: tuple[Storage, ...] = ()
    """The layer's input, or its casts, as backward asks for it."""

    @property
    def alike(self) -> tuple[object, ...]:
        """Equal for layers whose decisions cost the same: a first and a last layer differ in what they pass on."""
        return (*(one._replace(backward=0.0) for one in self.operators), *self.inputs, self.boundary, self.fixed)

    @property
    def saved(self) -> int:
        """All that it holds where everything is kept."""
        return sum(one.held for one in self.operators) + self.boundary + self.fixed


class Group(NamedTuple):
    """Layers of one stage that are alike."""

    chunk: int
    layers: tuple[int, ...]
    cost: LayerCost
    pinned: Mapping[str, Decision]
    """Operators that are decided already."""
    pinned_whole: bool = False
    """Whether its layers are to be recomputed as a whole."""
    pinned_boundary: bool = False
    """Whether its layers' input is to be swapped."""
    last: bool = False
    """Whether it is the last layer of its chunk: backward begins with it, so what it swaps would be reloaded at
    once."""


class Case(NamedTuple):
    """A moment at which a stage's memory can be at its most."""

    in_flight: tuple[int, ...]
    """The micro-batches held of each chunk."""
    running: int
    """The chunk that runs."""
    base: int
    """Bytes other than the activations of layers: parameters, gradients so far, optimizer states, what is held around
    the layers."""
    passing: int
    """What the running part needs in passing."""
    rebuilding: bool = True
    """Whether the chunk's last layer runs its backward: what it has recomputed or swapped is there again. Otherwise the
    loss is made, or the optimizer runs."""


@dataclass(frozen=True, kw_only=True)
class StageProblem:
    """What one stage has to decide."""

    stage: int
    groups: tuple[Group, ...]
    cases: tuple[Case, ...]
    micro_batches: int
    forward: float
    """Seconds of one micro-batch's forward, of all chunks."""
    backward: float
    """Seconds of its backward, where everything is kept."""
    link_out: float
    """Bytes a second to the host."""
    link_in: float
    copy_latency: float
    host: int
    """Bytes of the host's memory that this rank may take."""
    overlap: bool
    """Whether copies of one micro-batch may pass while another runs."""
    notes: tuple[str, ...] = field(default=())

    @property
    def seconds(self) -> float:
        """One micro-batch where everything is kept."""
        return self.forward + self.backward


def layer_cost(part: Part, seconds: Seconds) -> LayerCost:
    """What each decision costs in a part."""
    places = {one.name: place for place, one in enumerate(part.operators)}
    saved: dict[int, Storage] = {}
    owned: dict[str, list[int]] = {name: [] for name in places}
    given: list[int] = []
    fixed = 0
    for pack in part.packs:
        if pack.value < 0 or pack.source in ("root", "static"):
            continue
        if pack.value in saved:
            saved[pack.value] = saved[pack.value]._replace(last=pack.position)
            continue
        saved[pack.value] = Storage(part.values[pack.value].size, pack.position, pack.position)
        if pack.source == "boundary":
            given.append(pack.value)
        elif pack.movable and pack.owner in places:
            owned[pack.owner].append(pack.value)
        else:
            fixed += part.values[pack.value].size
    time = _time_by_operator(part, part.forward, seconds)
    backward = _time_by_operator(part, part.backward, seconds)
    readers: dict[int, set[int]] = {}
    for call in part.calls:
        for value in call.inputs if call.operator in places else ():
            readers.setdefault(value, set()).add(places[call.operator])
    inputs: list[Input] = []
    for value, found in sorted(readers.items()):
        storage = part.values[value]
        if storage.source in ("operator", "boundary") and value not in saved:
            owner_place = places.get(storage.owner) if value != part.input else None
            others = found - {owner_place}
            if others:
                inputs.append(Input(storage.size, owner_place, tuple(sorted(others))))
    gradients = sum(one.size for one in part.values if one.gradient)
    return LayerCost(
        operators=tuple(
            OperatorCost(
                one.name,
                tuple(saved[value] for value in owned[one.name]),
                sum(saved[value].size for value in owned[one.name]),
                time.get(one.name, 0.0),
                one.repeatable,
                backward.get(one.name, 0.0),
            )
            for one in part.operators
        ),
        inputs=tuple(inputs),
        boundary=sum(saved[value].size for value in given),
        given=part.values[part.input].size if part.input is not None else 0,
        fixed=fixed,
        passing=_passing(part),
        passing_whole=_passing_whole(part),
        forward=sum(time.values()),
        again=sum(_time_by_operator(part, _until_last_save(part), seconds).values()),
        backward=sum(backward.values()),
        gradients=gradients or sum(part.static.gradients),
        output=part.values[part.output].size if part.output is not None else 0,
        boundary_storages=tuple(saved[value] for value in given),
    )


def stage_problems(
    trace: Trace,
    device: Device,
    pipeline: Pipeline,
    seconds: Seconds,
    *,
    host_memory: int | None = None,
    fixed: Resolution | None = None,
) -> tuple[StageProblem, ...]:
    """What each stage has to decide."""
    costs = tuple(layer_cost(part, seconds) for part in trace.parts)
    before, after = layer_cost(trace.before, seconds), layer_cost(trace.after, seconds)
    schedule = actions(pipeline)
    shares = _host_shares(trace, device, pipeline, host_memory)
    problems = []
    for stage, chunks in enumerate(pipeline.placement):
        groups: list[Group] = []
        around = [0] * len(chunks)
        passing = [0] * len(chunks)
        losses = 0
        static = 0
        gradients = [0] * len(chunks)
        forward = backward = 0.0
        for chunk, layers in enumerate(chunks):
            place = position(pipeline, stage, chunk)
            first, last = place == 0, place == pipeline.stages * pipeline.chunks - 1
            alike: dict[object, list[int]] = {}
            pins: dict[object, tuple[Mapping[str, Decision], bool, bool]] = {}
            for layer in layers:
                pin = _pins(fixed, layer)
                key = (costs[trace.layers[layer]].alike, tuple(pin[0].items()), *pin[1:], layer == layers[-1])
                pins[key] = pin
                alike.setdefault(key, []).append(layer)
            groups += [
                Group(chunk, tuple(found), costs[trace.layers[found[0]]], *pins[key], last=found[0] == layers[-1])
                for key, found in alike.items()
            ]
            parts = [costs[trace.layers[layer]] for layer in layers]
            extra = [before] * first + [after] * last
            forward += sum(one.forward for one in (*parts, *extra))
            backward += sum(one.backward for one in (*parts, *extra))
            gradients[chunk] = sum(one.gradients for one in (*parts, *extra))
            static += sum(_permanent(trace.parts[trace.layers[layer]]) for layer in layers)
            around[chunk] += before.saved if first else 0
            around[chunk] += after.saved - after.boundary if last else 0
            around[chunk] += parts[-1].output if not last and parts and pipeline.stages > 1 else 0
            passing[chunk] = parts[-1].passing if parts else 0
            if last:
                losses = after.passing_whole - after.saved + after.boundary
                static += _permanent(trace.after)
            if first:
                static += _permanent(trace.before)
        cases = _cases(schedule[stage], static, gradients, around, passing)
        if losses:
            # The loss is made while every layer's activations are held.
            last_chunk = max(range(len(chunks)), key=lambda chunk: position(pipeline, stage, chunk))
            cases += tuple(one._replace(passing=losses, rebuilding=False) for one in cases if one.running == last_chunk)
        at_end = max(max(cost.passing for cost in costs), _optimizer_passing(trace.optimizer))
        cases += (Case((0,) * len(chunks), 0, static + sum(gradients), at_end, rebuilding=False),)
        problems.append(
            StageProblem(
                stage=stage,
                groups=tuple(groups),
                cases=cases,
                micro_batches=pipeline.micro_batches,
                forward=forward,
                backward=backward,
                link_out=device.link_out * device.efficiency.get("link_out", 1.0),
                link_in=device.link_in * device.efficiency.get("link_in", 1.0),
                copy_latency=device.copy_latency,
                host=shares[stage],
                overlap=pipeline.micro_batches > 1,
            )
        )
    return tuple(problems)


def _permanent(part: Part) -> int:
    """What stays over the step, gradients aside, and what lives longer than the part: rotary tables, cast weights."""
    return part.static.total - sum(part.static.gradients) + sum(one.size for one in part.values if one.until)


def _optimizer_passing(part: Part) -> int:
    """The most that the optimizer's step needs in addition to its states."""
    live = most = 0
    for what, number in part.forward:
        if what in ("make", "free"):
            live += part.values[number].size if what == "make" else -part.values[number].size
            most = max(most, live)
    return most


def _pins(fixed: Resolution | None, layer: int) -> tuple[dict[str, Decision], bool, bool]:
    """What is decided already in a layer."""
    if fixed is None:
        return {}, False, False
    resolved = fixed.layers[layer]
    decisions: dict[str, Decision] = {
        name: one for name, one in resolved.decisions.items() if not isinstance(one, Keep)
    }
    whole = bool(decisions) and len(decisions) == len(resolved.decisions)
    whole = whole and all(isinstance(one, Recompute) for one in decisions.values())
    return ({} if whole else decisions), whole, isinstance(resolved.boundary, Swap)


def _cases(
    schedule: Sequence[Action], static: int, gradients: Sequence[int], around: Sequence[int], passing: Sequence[int]
) -> tuple[Case, ...]:
    """Every moment that no other includes."""
    held = [0] * len(gradients)
    there = [0] * len(gradients)
    found: dict[tuple[tuple[int, ...], int], int] = {}
    for action in schedule:
        if action.kind == "forward":
            held[action.chunk] += 1
        if action.kind in ("backward", "input"):
            key = tuple(held), action.chunk
            base = static + sum(there) + sum(n * bytes_ for n, bytes_ in zip(held, around, strict=True))
            found[key] = max(found.get(key, 0), base)
        if action.kind in ("backward", "weight"):
            held[action.chunk] -= 1
            there[action.chunk] = gradients[action.chunk]
    cases = [Case(counts, chunk, base, passing[chunk]) for (counts, chunk), base in found.items()]
    # Memory is linear in the counts, so a moment between two others is never the worst.
    for one in sorted(cases):
        others = [other for other in cases if other != one and other.running == one.running]
        pairs = ((first, second) for place, first in enumerate(others) for second in others[place:])
        if any(_between(one, first, second) for first, second in pairs):
            cases.remove(one)
    return tuple(cases)


def _between(one: Case, first: Case, second: Case) -> bool:
    """Whether some mixture of two moments holds at least as much as ``one``."""
    low, high = 0.0, 1.0
    rows = ((*case.in_flight, case.base) for case in (one, first, second))
    for count, a, b in zip(*rows, strict=True):
        # share * a + (1 - share) * b >= count
        if a == b:
            if a < count:
                return False
        elif a > b:
            low = max(low, (count - b) / (a - b))
        else:
            high = min(high, (count - b) / (a - b))
    return low <= high + 1e-12


def _host_shares(trace: Trace, device: Device, pipeline: Pipeline, host_memory: int | None) -> tuple[int, ...]:
    """Each rank's share of its node's memory: its ranks share it equally, half is left to everything else."""
    total = device.host_memory if host_memory is None else host_memory
    ranks = pipeline.stages * (trace.layout or Layout()).stage
    share = total if host_memory is not None else total // 2
    return (share // max(1, min(ranks, device.devices_per_node)),) * pipeline.stages


def _time_by_operator(part: Part, events: Sequence[Event], seconds: Seconds) -> dict[str, float]:
    """The seconds of each operator's kernels; those of no operator are filed under an empty name."""
    time: dict[str, float] = {}
    for what, number in events:
        if what == "run":
            kernel = part.kernels[number]
            time[kernel.operator] = time.get(kernel.operator, 0.0) + seconds(kernel)
    return time


def _until_last_save(part: Part) -> tuple[Event, ...]:
    """What is recomputed of the forward of a layer that is as a whole."""
    saves = [place for place, (what, _) in enumerate(part.forward) if what == "save"]
    return part.forward[: saves[-1] + 1] if saves else ()


def _passing(part: Part, start: int = 0) -> int:
    """The most that a backward needs in addition to what is held when it begins; what it frees makes room."""
    pending: dict[int, int] = {}
    for pack in part.packs:
        if pack.value >= 0 and pack.source in ("operator", "boundary"):
            pending[pack.value] = pending.get(pack.value, 0) + 1
    live = start
    if part.output_gradient is not None:
        live += part.values[part.output_gradient].size
    most = live
    for what, number in part.backward:
        if what == "make" and not part.values[number].gradient:
            live += part.values[number].size
        elif what == "free" and not part.values[number].gradient:
            live -= part.values[number].size
        elif what == "done" and part.packs[number].value in pending:
            value = part.packs[number].value
            pending[value] -= 1
            if not pending[value]:
                live -= part.values[value].size
        most = max(most, live)
    return most


def _passing_whole(part: Part) -> int:
    """The same for a part that runs its forward again first; its input is held."""
    saved = {pack.value for pack in part.packs if pack.value >= 0 and pack.source == "operator"}
    live = part.values[part.output_gradient].size if part.output_gradient is not None else 0
    most = live
    for what, number in part.forward:
        if what in ("make", "free") and (number == part.input or part.values[number].until):
            continue
        if what == "make":
            live += part.values[number].size
        elif what == "free" and number not in saved:
            live -= part.values[number].size
        most = max(most, live)
    return max(most, _passing(part, sum(part.values[value].size for value in saved)))

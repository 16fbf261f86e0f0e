"""Simulate a step: the memory and the time of a Policy, from a Trace and a Device, without either.

Each pipeline stage is replayed alone, event by event, which gives its memory and the seconds of each of its actions.
The step's time follows from the actions of all stages and what they wait for.

What is assumed: parameters have no gradient when the step begins, as after ``zero_grad``; a stage's buffers for what it
receives are allocated once for all micro batches, as torch's pipelining does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from lowtide.cost.device import Device
from lowtide.errors import PlanError
from lowtide.plan.pipeline import Pipeline
from lowtide.plan.program import Program, codes_of, compile_part
from lowtide.plan.replay import Instance, Rank, Storage
from lowtide.plan.schedule import Action, ActionKind, actions, position, replay
from lowtide.plan.simulation import Share, Simulation, StageSimulation
from lowtide.policy import Catalogue, Decision, Keep, LayerPolicy, Policy, Recompute, Resolution, Swap, resolve
from lowtide.trace.trace import Part, Static, Trace

__all__ = ["simulate"]


def simulate(
    trace: Trace,
    policy: Policy | Resolution,
    device: Device,
    pipeline: Pipeline | None = None,
    *,
    details: bool = False,
    optimizer: bool = True,
    stages: Sequence[int] | None = None,
) -> Simulation:
    """What a step of ``policy`` does on ``device``: memory and time.

    ``details`` also says how memory goes over time, what each lane does and what the peak is made of. ``optimizer``
    includes the optimizer's step. ``stages`` are the pipeline stages to look at; all, if it is left out. The step's
    time then is that of these stages alone.
    """
    pipeline = pipeline or Pipeline()
    if not pipeline.placement:
        pipeline = replace(pipeline, placement=((tuple(range(len(trace.layers))),),))
    layers = _layers(trace, policy, pipeline)
    wanted = tuple(range(pipeline.stages)) if stages is None else tuple(stages)
    shortened = _shortened(pipeline)
    schedule = actions(shortened)
    more = pipeline.micro_batches / shortened.micro_batches
    replayed: dict[int, _Replayed] = {}
    for stage in wanted:
        replayed[stage] = _replay_stage(trace, layers, device, pipeline, stage, schedule[stage], details, optimizer)
    if wanted == tuple(range(pipeline.stages)):
        transfer = _transfer_seconds(trace, device, pipeline)
        step = replay(pipeline, lambda stage, action: replayed[stage].seconds_of(action), transfer)
        ends = [end + replayed[stage].optimizer for stage, end in enumerate(step.ends)]
        seconds, bubble = max(ends), step.bubble
    else:
        ends = [0.0] * pipeline.stages
        for stage, one in replayed.items():
            ends[stage] = sum(map(one.seconds_of, actions(pipeline)[stage])) + one.optimizer
        seconds, bubble = max(ends), 0.0
    return Simulation(
        seconds=seconds,
        stages=tuple(replace(_whole_step(replayed[stage], more), seconds=ends[stage]) for stage in wanted),
        bubble=bubble,
        notes=_notes(policy, pipeline),
    )


_Decided: TypeAlias = tuple[Mapping[str, Decision], Keep | Swap, bool]
"""What becomes of a layer's operators, of its input, and whether it is recomputed as a whole."""


def _layers(trace: Trace, policy: Policy | Resolution, pipeline: Pipeline) -> list[_Decided]:
    """What is decided for each layer. A Policy is applied to each chunk alone, as a model of its own."""
    if len(policy.layers) != len(trace.layers):
        raise PlanError(f"the policy decides {len(policy.layers)} layers and the trace has {len(trace.layers)}")
    found: dict[int, _Decided] = {}
    for own in (chunk for stage in pipeline.placement for chunk in stage):
        if isinstance(policy, Policy):
            part = replace(policy, layers=tuple(policy.layers[layer] for layer in own), root=LayerPolicy())
            catalogue = Catalogue(tuple(trace.parts[trace.layers[layer]].catalogue for layer in own))
            resolved = resolve(part, catalogue, require_match=False).layers
            whole = [_is_whole(one) for one in part.layers]
        else:
            resolved = tuple(policy.layers[layer] for layer in own)
            whole = [
                bool(one.decisions) and all(isinstance(each, Recompute) for each in one.decisions.values())
                for one in resolved
            ]
        for layer, one, all_of_it in zip(own, resolved, whole, strict=True):
            found[layer] = (one.decisions, one.boundary, all_of_it)
    if len(found) != len(trace.layers):
        raise PlanError(f"the pipeline places {len(found)} layers and the trace has {len(trace.layers)}")
    return [found[layer] for layer in range(len(found))]


def _is_whole(settings: LayerPolicy) -> bool:
    """As the runtime has it: an operator that is kept makes it a matter of single operators."""
    return isinstance(settings.default, Recompute) and not any(
        isinstance(rule.decision, Keep) for rule in settings.rules
    )


def _notes(policy: Policy | Resolution, pipeline: Pipeline) -> tuple[str, ...]:
    notes = []
    root = policy.root
    decided = root != LayerPolicy() if isinstance(policy, Policy) else any(
        not isinstance(one, Keep) for one in policy.root.decisions.values()
    )  # fmt: skip
    if decided:
        notes.append("decisions for what is outside the layers are not carried out, and not simulated")
    if pipeline.schedule in ("zero_bubble", "zero_bubble_v", "dualpipe_v"):
        notes.append("where a backward is split, a micro batch is taken to hold its memory until the weights' half")
    return tuple(notes)


def _shortened(pipeline: Pipeline) -> Pipeline:
    """The same pipeline with fewer micro batches, where more of them hold no more memory at one time."""
    enough = {
        "1f1b": pipeline.stages + 2,
        "interleaved": pipeline.stages * (pipeline.chunks + 2),
        "zero_bubble": pipeline.stages * (pipeline.chunks + 2),
        "zero_bubble_v": 4 * pipeline.stages,
        "dualpipe_v": 4 * pipeline.stages,
    }.get(pipeline.schedule)
    if enough is None or enough >= pipeline.micro_batches:
        return pipeline
    return replace(pipeline, micro_batches=enough)


def _whole_step(one: _Replayed, more: float) -> StageSimulation:
    """A stage's sums for all micro batches of the step, where it was replayed with fewer."""
    result = one.result
    if more == 1:
        return result
    return replace(
        result,
        busy=(result.busy - one.optimizer) * more + one.optimizer,
        stall=result.stall * more,
        recompute=result.recompute * more,
        moved=round(result.moved * more),
    )


def _transfer_seconds(trace: Trace, device: Device, pipeline: Pipeline) -> float:
    """How long a boundary takes from one stage to the next, whose device may be on another node."""
    size = max((_size(trace.parts[place], "input") for place in trace.layers), default=0)
    inside = trace.layout.get("tp", 1) * trace.layout.get("dp", 1) * pipeline.stages <= device.devices_per_node
    rate = device.interconnect if inside else device.network
    return device.collective_latency + size / (rate * device.efficiency.get("collective", 1.0))


@dataclass
class _Replayed:
    """What a stage's own replay showed."""

    result: StageSimulation
    seconds: dict[Action, float]
    optimizer: float
    weight_share: float = 0.5
    """The share of a backward that computes parameters' gradients."""
    usual: dict[tuple[str, int], float] = field(default_factory=dict)

    def seconds_of(self, action: Action) -> float:
        """The seconds of an action; of one that was left out, those of the one before it."""
        kind: ActionKind = "backward" if action.kind in ("input", "weight") else action.kind
        whole = self.seconds.get(action._replace(kind=kind), self.usual[kind, action.chunk])
        if action.kind == "input":
            return whole * (1 - self.weight_share)
        return whole * self.weight_share if action.kind == "weight" else whole


def _replay_stage(
    trace: Trace,
    layers: Sequence[_Decided],
    device: Device,
    pipeline: Pipeline,
    stage: int,
    schedule: Sequence[Action],
    details: bool,
    optimizer: bool,
) -> _Replayed:
    chunks = [_chunk(trace, layers, pipeline, stage, chunk) for chunk in range(pipeline.chunks)]
    play = partial(_play, trace, chunks, device, pipeline, stage, schedule, optimizer)
    played = play(details=details)
    if details:  # a second time, up to the peak, to see what is there
        peak = played.rank.peak_allocation
        played_again = play(details=True, stop_at=peak)
        shares = _shares(played_again.rank.snapshot)
        result = replace(
            played.result,
            shares=shares,
            memory=tuple(played.rank.moments or ()),
            spans=tuple(played.rank.spans or ()),
            peak_at=played.rank.peak_at,
        )
        played = replace(played, result=result)
    usual = {(action.kind, action.chunk): seconds for action, seconds in played.seconds.items()}
    share = _weight_share(played.rank, [one for chunk in chunks for one in chunk])
    return _Replayed(played.result, played.seconds, played.optimizer, share, {(k, c): s for (k, c), s in usual.items()})


@dataclass(frozen=True)
class _Step:
    """One part of a chunk."""

    program: Program
    layer: int | None
    offset: int = 0
    passes: bool = False
    last: bool = False


def _chunk(trace: Trace, layers: Sequence[_Decided], pipeline: Pipeline, stage: int, chunk: int) -> tuple[_Step, ...]:
    """What a chunk runs: its layers, what comes before them in the first one and after them in the last."""
    own = pipeline.placement[stage][chunk]
    swaps = any(isinstance(one, Swap) for layer in own for one in (layers[layer][1], *layers[layer][0].values()))
    steps: list[_Step] = []
    place = position(pipeline, stage, chunk)
    if place == 0:
        steps.append(_Step(_compile(trace.before, {}, Keep(), False, frozenset(), False), None))
    due: frozenset[int] = frozenset()
    offset = 0
    for layer in own:
        part = trace.parts[trace.layers[layer]]
        decisions, boundary, whole = layers[layer]
        program = _compile(part, decisions, boundary, whole, due, swaps)
        passes = bool(due) and (program.idle or (whole and not isinstance(boundary, Swap)))
        steps.append(_Step(program, layer, offset, passes, layer == own[-1]))
        offset += program.operators
        due = frozenset(number - program.operators for number in due | program.due if number > program.operators)
    if place == pipeline.stages * pipeline.chunks - 1:
        steps.append(_Step(_compile(trace.after, {}, Keep(), False, frozenset(), False), None))
    return tuple(steps)


_compiled: dict[Any, Program] = {}


def _compile(
    part: Part,
    decisions: Mapping[str, Decision],
    boundary: Keep | Swap,
    whole: bool,
    due: frozenset[int],
    noticed: bool,
) -> Program:
    key = (part.digest, tuple(decisions.items()), boundary, whole, due, noticed)
    found = _compiled.get(key)
    if found is None:
        if len(_compiled) > 4096:
            _compiled.clear()
        found = compile_part(part, decisions, boundary, whole=whole, due_before=due, noticed=noticed)
        _compiled[key] = found
    return found


@dataclass(frozen=True)
class _Played:
    rank: Rank
    result: StageSimulation
    seconds: dict[Action, float]
    optimizer: float


def _play(
    trace: Trace,
    chunks: Sequence[Sequence[_Step]],
    device: Device,
    pipeline: Pipeline,
    stage: int,
    schedule: Sequence[Action],
    optimizer: bool,
    *,
    details: bool,
    stop_at: int = -1,
) -> _Played:
    rank = Rank(device, details=details)
    rank.stop_at = stop_at
    static = [step.program.part.static for chunk in chunks for step in chunk]
    for what in ("parameters", "buffers", "optimizer"):
        for step, sizes in zip((step for chunk in chunks for step in chunk), static, strict=True):
            _allocate(rank, getattr(sizes, what), what, step.layer)
    for step in (step for chunk in chunks for step in chunk):
        if not any(value.gradient for value in step.program.part.values):
            _allocate(rank, step.program.part.static.gradients, "gradients", step.layer)
    ends = [_Ends(rank, trace, chunk, pipeline, stage, number) for number, chunk in enumerate(chunks)]
    running: dict[tuple[int, int], _Running] = {}
    seconds: dict[Action, float] = {}
    held = most = 0
    for action in schedule:
        before = max(rank.lanes.computation, rank.lanes.host)
        key = action.chunk, action.micro_batch
        if action.kind == "forward":
            running[key] = _forward(rank, chunks[action.chunk], ends[action.chunk], action.micro_batch)
            held += 1
            most = max(most, held)
        elif action.kind in ("backward", "weight"):
            _backward(rank, running.pop(key), ends[action.chunk])
            held -= 1
        if action.kind != "input":
            whole = action if action.kind == "forward" else action._replace(kind="backward")
            seconds[whole] = max(rank.lanes.computation, rank.lanes.host) - before
    for end in ends:
        end.close()
    before = max(rank.lanes.computation, rank.lanes.host)
    if optimizer:
        _optimize(rank, trace, static)
    took = max(rank.lanes.computation, rank.lanes.host) - before
    result = StageSimulation(
        stage=stage,
        peak=rank.allocator.peak,
        reserved=rank.allocator.reserved,
        static=sum(one.total for one in static),
        seconds=0.0,
        busy=rank.lanes.busy,
        stall=rank.lanes.stall,
        recompute=rank.recompute,
        moved=rank.moved,
        host_peak=rank.host_peak,
        in_flight=most,
    )
    return _Played(rank, result, seconds, took)


def _allocate(rank: Rank, sizes: Sequence[int], what: str, layer: int | None) -> None:
    for size in sizes:
        if size:
            storage = rank.make(size)
            storage.what, storage.layer, storage.operator = what, layer, ""


class _Ends:
    """A chunk's ends: what it receives and sends, and who holds that."""

    def __init__(
        self, rank: Rank, trace: Trace, chunk: Sequence[_Step], pipeline: Pipeline, stage: int, number: int
    ) -> None:
        self.rank = rank
        place = position(pipeline, stage, number)
        self.first, self.last = place == 0, place == pipeline.stages * pipeline.chunks - 1
        self.split = pipeline.stages * pipeline.chunks > 1
        self.sent: Storage | None = None
        self.latest: Storage | None = None
        given = 0 if self.first else _size(chunk[0].program.part, "input")
        returned = 0 if self.last else _size(chunk[-1].program.part, "output_gradient")
        self.inputs = [self._buffer(given) for _ in range(pipeline.micro_batches if given else 0)]
        self.gradients = [self._buffer(returned) for _ in range(pipeline.micro_batches if returned else 0)]

    def _buffer(self, size: int) -> Storage:
        storage = self.rank.make(size)
        storage.what = "boundaries"
        return storage

    def input(self, micro_batch: int) -> Storage | None:
        """What the chunk is given, held once more."""
        return _held(self.inputs, micro_batch)

    def gradient(self, micro_batch: int) -> Storage | None:
        """The gradient of what it gave."""
        return _held(self.gradients, micro_batch)

    def gave(self, output: Storage | None) -> None:
        """What a forward gave is held until its backward has ended, and also until the next forward has."""
        if output is not None and self.split:
            output.count += 1
        if self.latest is not None:
            self.rank.drop(self.latest)
        self.latest = output if self.split else None

    def send_back(self, gradient: Storage | None) -> None:
        """The gradient of the input is held until the next one is on its way."""
        if self.sent is not None:
            self.rank.drop(self.sent)
        self.sent = gradient

    def close(self) -> None:
        """The schedule has ended."""
        self.send_back(None)
        self.gave(None)


def _held(buffers: Sequence[Storage], micro_batch: int) -> Storage | None:
    if not buffers:
        return None
    storage = buffers[micro_batch]
    storage.count += 1
    return storage


@dataclass
class _Running:
    """A micro batch in a chunk, between its forward and its backward."""

    micro_batch: int
    instances: list[Instance]
    until_backward: list[Storage]
    output: Storage | None


def _forward(rank: Rank, chunk: Sequence[_Step], ends: _Ends, micro_batch: int) -> _Running:
    instances: list[Instance] = []
    until: Mapping[str, list[Storage]] = {"forward": [], "backward": []}
    storage = ends.input(micro_batch)
    handed: list[Storage | None] = []
    across: list[Storage | None] = []
    for step in chunk:
        instance = Instance(
            step.program,
            step.layer,
            micro_batch,
            step.offset,
            passes=step.passes,
            last=step.last,
            keeps=step.program.part.result if ends.split else None,
        )
        if step.program.part.name == "after":  # what was made before the layers and is freed here
            for number, left in zip(step.program.part.across, across, strict=False):
                if left is not None:
                    instance.slots[number] = left
            across = []
        storage = rank.forward(instance, storage, handed)
        handed = instance.handed
        instances.append(instance)
        part = step.program.part
        if part.name == "before":
            across = [instance.slots.pop(number, None) for number in part.across]
        for number, left in instance.slots.items():
            if number == part.input:  # it was lent: whoever made it says how long it lives
                rank.drop(left)
            else:
                until[part.values[number].until or "backward"].append(left)
        instance.slots = {}
    for one in [*until["forward"], *(one for one in (*handed, *across) if one is not None)]:
        rank.drop(one)
    output = instances[-1].kept if storage is None else storage
    ends.gave(output)
    return _Running(micro_batch, instances, until["backward"], output)


def _backward(rank: Rank, running: _Running, ends: _Ends) -> None:
    gradient = ends.gradient(running.micro_batch)
    handed: list[Storage | None] = []
    for instance in reversed(running.instances):
        gradient = rank.backward(instance, gradient, handed)
        handed = instance.handed
    for storage in handed:
        if storage is not None:
            rank.drop(storage)
    if ends.first:
        if gradient is not None:
            rank.drop(gradient)
    else:
        ends.send_back(gradient)
    for storage in running.until_backward:
        rank.drop(storage)
    if running.output is not None:
        rank.drop(running.output)


def _optimize(rank: Rank, trace: Trace, static: Sequence[Static]) -> None:
    """The optimizer's step; of a stage that has a part of the parameters, that share of it."""
    everything = [trace.before.static, trace.after.static, *(trace.parts[place].static for place in trace.layers)]
    total = sum(sum(one.parameters) for one in everything)
    share = sum(sum(one.parameters) for one in static) / total if total else 1.0
    part = trace.optimizer
    if share < 1:
        part = replace(
            part,
            values=tuple(value._replace(size=int(value.size * share)) for value in part.values),
            kernels=tuple(
                kernel._replace(
                    touched=int(kernel.touched * share),
                    seconds=kernel.seconds * share if kernel.seconds is not None else None,
                )
                for kernel in part.kernels
            ),
        )
    rank.optimize(part, codes_of(part))


def _size(part: Part, name: str) -> int:
    """The bytes of a value that a part names; a gradient is as large as its value."""
    value = getattr(part, name)
    if value is None and name == "output_gradient":
        value = part.output
    return part.values[value].size if value is not None else 0


def _weight_share(rank: Rank, steps: Sequence[_Step]) -> float:
    weight = total = 0.0
    for step in steps:
        part = step.program.part
        timed = rank.timed(part)
        for what, number in part.backward:
            if what == "run":
                total += timed[number].seconds
                weight += timed[number].seconds * any(part.values[one].gradient for one in part.kernels[number].writes)
    return weight / total if total else 0.5


def _shares(snapshot: Sequence[Storage]) -> tuple[Share, ...]:
    """What is there, by what it is, the largest first."""
    found: dict[tuple[str, int | None, str], int] = {}
    for storage in snapshot:
        key = (storage.what, storage.layer, storage.operator)
        found[key] = found.get(key, 0) + storage.size
    order: Callable[[Share], tuple[int, str, str, int]] = lambda one: (  # noqa: E731
        -one.bytes, one.what, one.operator, -1 if one.layer is None else one.layer,
    )  # fmt: skip
    return tuple(sorted((Share(*key, size) for key, size in found.items()), key=order))

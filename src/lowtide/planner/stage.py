"""One pipeline stage: its chunks, what they receive and send, and its actions replayed one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypeAlias

from lowtide.cost.device import Device
from lowtide.planner.allocator import Limit
from lowtide.planner.boundaries import StageEnds
from lowtide.planner.cache import Cache
from lowtide.planner.casts import cast_weights, without_casts
from lowtide.planner.instance import Instance
from lowtide.planner.pipeline import Pipeline
from lowtide.planner.program import Program, codes_of, compile_part
from lowtide.planner.rank import Rank, Storage
from lowtide.planner.replay import Player
from lowtide.planner.schedule import HALVES, Action, is_folded, position
from lowtide.planner.sharded import Sharing, sharing_of
from lowtide.planner.simulation import Share, StageSimulation
from lowtide.policy import Decision, Keep, Swap
from lowtide.trace.trace import Part, Static, Trace, Value

__all__ = ["Decided", "Stage"]

Decided: TypeAlias = tuple[Mapping[str, Decision], Keep | Swap, bool]
"""What becomes of a layer's operators, of its input, and whether it is recomputed as a whole."""


class Stage:
    """A stage's device and what runs on it."""

    def __init__(
        self,
        trace: Trace,
        layers: Sequence[Decided],
        device: Device,
        pipeline: Pipeline,
        number: int,
        *,
        details: bool = False,
        stop_at: int = -1,
        limit: Limit | None = None,
    ) -> None:
        self.trace, self.number = trace, number
        self.chunks = [_chunk(trace, layers, pipeline, number, chunk) for chunk in range(pipeline.chunks)]
        self.player = Player(device, details=details, stop_at=stop_at, limit=limit)
        self.rank = self.player.rank
        steps = [step for chunk in self.chunks for step in chunk]
        self.static = [step.program.part.static for step in steps]
        for what in ("parameters", "buffers", "optimizer"):
            for step in steps:
                _allocate(self.rank, getattr(step.program.part.static, what), what, step.layer)
        for chunk in range(pipeline.chunks):
            if position(pipeline, number, chunk):
                # Every chunk has the tables of positions, not only the one that has the embedding.
                _allocate(self.rank, trace.before.static.buffers, "buffers", None)
        around = [step for step in steps if step.layer is None]
        for step in steps:
            # Where ranks share parameters, those around the layers have their gradients in one storage.
            if not any(value.gradient for one in (around if step in around else [step]) for value in one.values):
                _allocate(self.rank, step.program.part.static.gradients, "gradients", step.layer)
        self.player.casts.shared = _is_split(pipeline) and any(cast_weights(step.program.part) for step in steps)
        self.player.defers = self.player.casts.shared and pipeline.schedule not in HALVES
        self.ends = [self._ends(pipeline, place) for place in range(len(self.chunks))]
        for one, other in pairwise(self.ends):
            if is_folded(pipeline) and abs(one.place - other.place) == 1:
                one.after, other.before = other, one
        self.running: dict[tuple[int, int], _Running] = {}
        self.most = 0
        self.seconds: dict[Action, float] = {}
        """What each action took."""
        self.optimizer_seconds = 0.0

    def _ends(self, pipeline: Pipeline, chunk: int) -> StageEnds:
        own = self.chunks[chunk]
        first, last = own[0].program.part, own[-1].program.part
        place = position(pipeline, self.number, chunk)
        return StageEnds(self.rank, first, last, pipeline, place, frees=self.trace.frees_boundaries)

    @property
    def now(self) -> float:
        """When everything so far has been done."""
        return max(self.rank.lanes.computation, self.rank.lanes.host)

    def wait(self, until: float) -> None:
        """What follows comes after something of another stage."""
        self.rank.lanes.computation = max(self.rank.lanes.computation, until)

    def act(self, action: Action) -> None:
        """Replay an action."""
        before, key = self.now, (action.chunk, action.micro_batch)
        self.player.swapping.of_chunk(action.chunk)
        if action.kind == "forward":
            chunk, ends = self.chunks[action.chunk], self.ends[action.chunk]
            self.player.casts.fill((step.layer, step.program.part) for step in chunk)
            self.running[key] = _forward(self.player, chunk, ends, action.micro_batch)
            self.most = max(self.most, len(self.running))
        elif action.kind == "backward" or (action.kind == "weight" and self.ends[action.chunk].first):
            _backward(self.player, self.running.pop(key), self.ends[action.chunk])
        elif action.kind == "weight":
            _second_half(self.player, self.running.pop(key), self.ends[action.chunk])
        elif not self.ends[action.chunk].first:  # see [Note: two halves]
            _first_half(self.player, self.running[key], self.ends[action.chunk])
        self.seconds[action] = self.now - before

    def finish(self, *, optimizer: bool) -> StageSimulation:
        """The actions are over."""
        for end in self.ends:
            end.close()
        self.player.casts.clear()
        before = self.now
        self.player.accumulating.reduce()
        if optimizer:
            _optimize(self.player, self.trace, self.static)
        self.optimizer_seconds = self.now - before
        rank, swapping = self.rank, self.player.swapping
        return StageSimulation(
            stage=self.number,
            peak=rank.allocator.peak,
            reserved=rank.allocator.most_reserved,
            retries=rank.allocator.retries,
            requested=rank.most_bytes,
            static=sum(one.total for one in self.static),
            seconds=self.now,
            busy=rank.lanes.busy,
            stall=rank.lanes.stall,
            recompute=rank.recompute,
            optimizer=self.optimizer_seconds,
            moved=swapping.moved,
            host_peak=swapping.host_peak,
            in_flight=self.most,
            peak_at=rank.peak_at,
            memory=tuple(rank.moments or ()),
            spans=tuple(rank.spans or ()),
        )

    def shares(self) -> tuple[Share, ...]:
        """What was there at the allocation that it was to stop at, the largest first."""
        found: dict[tuple[str, int | None, str], int] = {}
        for storage in self.rank.snapshot:
            key = (storage.what, storage.layer, storage.operator)
            found[key] = found.get(key, 0) + storage.size
        shares = (Share(*key, size) for key, size in found.items())
        return tuple(sorted(shares, key=lambda one: (-one.bytes, one.what, one.operator, one.layer or 0)))


@dataclass(frozen=True)
class _Step:
    """One part of a chunk."""

    program: Program
    layer: int | None
    offset: int = 0
    passes: bool = False
    last: bool = False
    sharing: Sharing | None = None
    """What FSDP does in it, where a step has several micro-batches."""
    gathering: Program | None = None
    """What it does in the micro-batch that gathers its parameters."""

    @property
    def values(self) -> tuple[Value, ...]:
        """The values of its part."""
        return self.program.part.values


def _chunk(trace: Trace, layers: Sequence[Decided], pipeline: Pipeline, stage: int, chunk: int) -> tuple[_Step, ...]:
    """What a chunk runs: its layers, what comes before them in the first one and after them in the last."""
    own = pipeline.placement[stage][chunk]
    swaps = any(isinstance(one, Swap) for layer in own for one in (layers[layer][1], *layers[layer][0].values()))
    steps: list[_Step] = []
    place = position(pipeline, stage, chunk)

    def step(part: Part, decided: Decided, layer: int | None, offset: int, due: frozenset[int]) -> _Step:
        split = _is_split(pipeline)
        sharing = sharing_of(part) if split else None
        found = partial(_compile, decided=decided, due=due, noticed=swaps and layer is not None, split=split)
        program = found(part if sharing is None else sharing.later)
        passes = bool(due) and (program.idle or (decided[2] and not isinstance(decided[1], Swap)))
        gathering = None if sharing is None else found(sharing.gathering)
        return _Step(program, layer, offset, passes, own[-1:] == (layer,), sharing, gathering)

    kept: Decided = ({}, Keep(), False)
    if place == 0:
        steps.append(step(trace.before, kept, None, 0, frozenset()))
    due: frozenset[int] = frozenset()
    offset = 0
    for layer in own:
        one = step(trace.parts[trace.layers[layer]], layers[layer], layer, offset, due)
        steps.append(one)
        offset += one.program.operators
        count = one.program.operators
        due = frozenset(number - count for number in due | one.program.due if number > count)
    if place == pipeline.stages * pipeline.chunks - 1:
        steps.append(step(trace.after, kept, None, 0, frozenset()))
    return tuple(steps)


def _is_split(pipeline: Pipeline) -> bool:
    return pipeline.stages * pipeline.chunks > 1


_programs: Cache[Program] = Cache(512)  # some 70 kB each


def _compile(part: Part, decided: Decided, due: frozenset[int], noticed: bool, split: bool) -> Program:
    decisions, boundary, whole = decided

    def compiled() -> Program:
        compiling = partial(compile_part, boundary=boundary, whole=whole, due_before=due, noticed=noticed)
        return compiling(without_casts(part) if split else part, decisions)

    return _programs.get((part.digest, tuple(decisions.items()), boundary, whole, due, noticed, split), compiled)


def _allocate(rank: Rank, sizes: Sequence[int], what: str, layer: int | None) -> None:
    for size in sizes:
        if size:
            storage = rank.make(size)
            storage.what, storage.layer, storage.operator = what, layer, ""


@dataclass
class _Running:
    """A micro-batch in a chunk, between its forward and its backward."""

    micro_batch: int
    instances: list[Instance]
    until_backward: list[Storage]
    output: Storage | None
    """What the stage holds of its output until this backward has ended."""
    input_gradient: Storage | None = None
    """The gradient of its input, between the halves of its backward."""


def _forward(player: Player, chunk: Sequence[_Step], ends: StageEnds, micro_batch: int) -> _Running:
    instances: list[Instance] = []
    until: Mapping[str, list[Storage]] = {"forward": [], "backward": []}
    storage = ends.input(micro_batch)
    handed: list[Storage | None] = []
    across: list[Storage | None] = []
    for step in chunk:
        gathered = (step.layer, step.program.part.name) in player.accumulating.parameters
        instance = Instance(
            step.program if gathered or step.gathering is None else step.gathering,
            step.layer,
            micro_batch,
            step.offset,
            passes=step.passes,
            last=step.last,
            keeps=step.program.part.result if ends.split else None,
            sharing=step.sharing,
        )
        if step.program.part.name == "after":  # what was made before the layers and is freed here
            for number, left in zip(step.program.part.across, across, strict=False):
                if left is not None:
                    instance.slots[number] = left
            across = []
            if step.program.part.frees_at is not None:
                instance.frees, until["forward"][:] = list(until["forward"]), []
        storage = player.forward(instance, storage, handed)
        handed = instance.handed
        instances.append(instance)
        part = step.program.part
        if part.name == "before":
            across = [instance.slots.pop(number, None) for number in part.across]
        for number, left in instance.slots.items():
            if number == part.input:  # it was lent: its maker decides how long it lives
                player.rank.drop(left)
            else:
                until[part.values[number].until or "backward"].append(left)
        instance.slots = {}
    for one in [*until["forward"], *(one for one in (*handed, *across) if one is not None)]:
        player.rank.drop(one)
    output = instances[-1].kept if storage is None else storage
    return _Running(micro_batch, instances, until["backward"], ends.hold_output(output, micro_batch))


def _backward(player: Player, running: _Running, ends: StageEnds) -> None:
    gradient = _gradient_of_input(running, ends, player.backward)
    player.end_backward()
    _drop_handed(player, running)
    if ends.first:
        if gradient is not None:
            player.rank.drop(gradient)
    else:
        ends.send_back(gradient, running.micro_batch)
    _end(player, running, ends)


def _first_half(player: Player, running: _Running, ends: StageEnds) -> None:
    gradient = _gradient_of_input(running, ends, player.first_half)
    player.end_first_half(running.instances)
    _drop_handed(player, running)
    if gradient is not None:
        gradient.count += 1
        running.input_gradient = gradient
    ends.send_back(gradient, running.micro_batch)
    if ends.last and running.output is not None:  # it has the loss instead
        player.rank.drop(running.output)
        running.output = None


def _second_half(player: Player, running: _Running, ends: StageEnds) -> None:
    for instance in running.instances:
        player.second_half(instance)
    player.end_second_half(running.instances)
    if running.input_gradient is not None:
        player.rank.drop(running.input_gradient)
    _end(player, running, ends)


def _gradient_of_input(
    running: _Running,
    ends: StageEnds,
    play: Callable[[Instance, Storage | None, Sequence[Storage | None]], Storage | None],
) -> Storage | None:
    """Run the backward of all parts, or the first half of it; what the last of them hands on."""
    gradient = ends.gradient(running.micro_batch)
    handed: list[Storage | None] = []
    for instance in reversed(running.instances):
        gradient = play(instance, gradient, handed)
        handed = instance.handed
    return gradient


def _drop_handed(player: Player, running: _Running) -> None:
    """What the last part to run backward hands on in addition to its gradient goes nowhere."""
    player.rank.drop_all(storage for storage in running.instances[0].handed if storage is not None)


def _end(player: Player, running: _Running, ends: StageEnds) -> None:
    """A micro-batch's backward has ended."""
    for storage in [*running.until_backward, *(one for instance in running.instances for one in instance.left)]:
        player.rank.drop(storage)
    if running.output is not None:
        player.rank.drop(running.output)
    ends.ended(running.micro_batch)


def _optimize(player: Player, trace: Trace, static: Sequence[Static]) -> None:
    """The optimizer's step; of a stage that has a part of the parameters, that share of it."""
    everything = [trace.before.static, trace.after.static, *(trace.parts[place].static for place in trace.layers)]
    total = sum(sum(one.parameters) for one in everything)
    share = sum(sum(one.parameters) for one in static) / total if total else 1.0
    part = trace.optimizer.scaled(share) if share < 1 else trace.optimizer
    player.optimize(part, codes_of(part))

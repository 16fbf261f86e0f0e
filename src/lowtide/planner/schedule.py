"""Pipeline schedules: what each stage does in which order, what it holds meanwhile, and how long the step takes.

A stage runs its actions one after the other. An action waits for the same micro-batch in the chunk before it, or after
it in backward. So a list of actions for each stage is the whole schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, TypeAlias

from lowtide.errors import PlanError
from lowtide.planner.pipeline import Pipeline

__all__ = [
    "HALVES",
    "Action",
    "Replay",
    "Transfer",
    "actions",
    "held_together",
    "in_flight",
    "is_folded",
    "position",
    "replay",
    "same_stage",
    "shortened",
]

ActionKind: TypeAlias = Literal["forward", "backward", "input", "weight"]


HALVES = frozenset({"zero_bubble", "zero_bubble_v", "dualpipe_v"})
"""The schedules whose backward has two halves."""


class Action(NamedTuple):
    """One thing that a stage does."""

    kind: ActionKind
    """``input`` and ``weight`` are the two halves of a backward: the gradient of the chunk's input, which the chunk
    before waits for, and the gradients of its parameters, which no other action waits for."""
    chunk: int
    """Which of the stage's chunks (virtual stages)."""
    micro_batch: int


Transfer: TypeAlias = Callable[[int, int], float]
"""The seconds from one stage to another."""


class Replay(NamedTuple):
    """How long a step takes."""

    seconds: float
    """The step."""
    ends: tuple[float, ...]
    """When each stage has done its last action."""
    bubble: float
    """The share of the step that the busiest stage waits for others."""


def is_folded(pipeline: Pipeline) -> bool:
    """Whether every second chunk runs backwards through the stages, as a V."""
    return pipeline.schedule in ("zero_bubble_v", "dualpipe_v")


def position(pipeline: Pipeline, stage: int, chunk: int) -> int:
    """The index of a chunk in the order that data runs through the model."""
    column = pipeline.stages - 1 - stage if is_folded(pipeline) and chunk % 2 else stage
    return chunk * pipeline.stages + column


def same_stage(pipeline: Pipeline, one: int, other: int) -> bool:
    """Whether chunks with these indices are on one stage, so that nothing is sent between them."""

    def stage(place: int) -> int:
        chunk, column = divmod(place, pipeline.stages)
        return pipeline.stages - 1 - column if is_folded(pipeline) and chunk % 2 else column

    return stage(one) == stage(other)


def actions(pipeline: Pipeline) -> tuple[tuple[Action, ...], ...]:
    """The actions of every stage, in order.

    >>> from lowtide.planner.pipeline import even_pipeline
    >>> [f"{one.kind[0]}{one.micro_batch}" for one in actions(even_pipeline(2, stages=2, micro_batches=3))[0]]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    make = _SCHEDULES[pipeline.schedule]
    stages, chunks = max(1, pipeline.stages), pipeline.chunks
    _check(pipeline.schedule, stages, chunks, pipeline.micro_batches)
    return tuple(tuple(make(stage, stages, chunks, pipeline.micro_batches)) for stage in range(stages))


def held_together(stage: Sequence[Action]) -> tuple[tuple[int, ...], ...]:
    """How many micro-batches of each chunk a stage holds at one time: the cases that no other case includes.

    A micro-batch is held from its forward until its backward has ended, the weight half included.

    >>> held_together([Action("forward", 0, 0), Action("forward", 0, 1), Action("backward", 0, 0)])
    ((2,),)
    """
    chunks = 1 + max((action.chunk for action in stage), default=0)
    held = [0] * chunks
    found: dict[tuple[int, ...], None] = {}
    for action in stage:
        if action.kind == "forward":
            held[action.chunk] += 1
            found[tuple(held)] = None
        elif action.kind in ("backward", "weight"):
            held[action.chunk] -= 1
    return tuple(
        one
        for one in found
        if not any(other != one and all(a >= b for a, b in zip(other, one, strict=True)) for other in found)
    )


def in_flight(schedule: Sequence[Sequence[Action]]) -> tuple[tuple[int, ...], ...]:
    """The most micro-batches that each stage holds of each of its chunks."""
    return tuple(tuple(map(max, zip(*held_together(stage), strict=True))) for stage in schedule)


def shortened(pipeline: Pipeline) -> Pipeline:
    """The same pipeline with fewer micro-batches, where more of them hold no more memory at one time."""
    stages, micro_batches = pipeline.stages, pipeline.micro_batches
    group = micro_batches // max(1, micro_batches // stages)  # that go through a stage's chunks together
    enough = {
        "1f1b": stages + 2,
        "interleaved": 3 * group,
        "zero_bubble": 3 * group if pipeline.chunks > 1 else 2 * stages + 2,
        "zero_bubble_v": 4 * stages,
        "dualpipe_v": 4 * stages,
    }.get(pipeline.schedule, micro_batches)
    return pipeline if enough >= micro_batches else replace(pipeline, micro_batches=enough)


def replay(
    pipeline: Pipeline,
    seconds: Callable[[int, Action], float],
    transfer: Transfer = lambda source, stage: 0.0,
    begin: Callable[[int, float], None] | None = None,
) -> Replay:
    """The step's time when each action of a stage takes ``seconds(stage, action)``.

    ``transfer(source, stage)`` is the time to send a boundary from a stage to another. ``begin`` is called, before
    ``seconds`` is, with the stage that begins an action and the time.

    [Note: sends and receives]
    In torch's schedules of one chunk a stage asks for a boundary when it gets to the action that needs it, and between
    a forward and a backward it also waits for what it sends. The others ask ahead, and wait for no send.
    """
    schedule = actions(pipeline)
    last = max(1, pipeline.stages) * pipeline.chunks - 1
    waits = pipeline.schedule in ("gpipe", "1f1b")
    ended: dict[tuple[str, int, int], tuple[float, int]] = {}
    clock = [0.0] * len(schedule)
    busy = [0.0] * len(schedule)
    following = [0] * len(schedule)
    waiting = set(range(len(schedule)))
    while waiting:
        moved = False
        for stage in sorted(waiting):
            while following[stage] < len(schedule[stage]):
                action = schedule[stage][following[stage]]
                place = position(pipeline, stage, action.chunk)
                needs = _needs(action, place, last)
                if needs is not None and needs not in ended:
                    break
                ready, source = ended[needs] if needs is not None else (0.0, stage)
                start = clock[stage]
                if source == stage:
                    start = max(start, ready)
                elif waits:
                    start = max(start, ready) + transfer(source, stage)
                else:
                    start = max(start, ready + transfer(source, stage))
                before = schedule[stage][following[stage] - 1] if following[stage] else action
                if waits and before.kind != action.kind:
                    start = max(start, clock[stage] + _sending(before, stage, pipeline, transfer))
                if begin is not None:
                    begin(stage, start)
                took = seconds(stage, action)
                clock[stage] = start + took
                busy[stage] += took
                what = "input" if action.kind == "backward" else action.kind
                ended[what, place, action.micro_batch] = (clock[stage], stage)
                following[stage] += 1
                moved = True
            if following[stage] == len(schedule[stage]):
                waiting.discard(stage)
        if not moved:
            stuck = min(waiting)
            raise PlanError(
                f"the schedule {pipeline.schedule} cannot go on: stage {stuck} waits at"
                f" {schedule[stuck][following[stuck]]} for something that comes later"
            )
    step = max(clock)
    return Replay(step, tuple(clock), 1 - max(busy) / step if step else 0.0)


def _sending(action: Action, stage: int, pipeline: Pipeline, transfer: Transfer) -> float:
    """How long a stage with one chunk sends what an action made."""
    target = stage + (1 if action.kind == "forward" else -1)
    return transfer(stage, target) if 0 <= target < pipeline.stages else 0.0


def _needs(action: Action, place: int, last: int) -> tuple[str, int, int] | None:
    """What an action waits for, in addition to the stage's own order."""
    if action.kind == "weight":
        return "input", place, action.micro_batch
    if action.kind == "forward":
        return ("forward", place - 1, action.micro_batch) if place else None
    return ("input", place + 1, action.micro_batch) if place < last else ("forward", place, action.micro_batch)


def _check(schedule: str, stages: int, chunks: int, micro_batches: int) -> None:
    if schedule in ("gpipe", "1f1b") and chunks != 1:
        raise PlanError(f"the schedule {schedule} has one chunk a stage; found {chunks}; choose interleaved")
    if schedule in ("zero_bubble_v", "dualpipe_v") and chunks != 2:
        raise PlanError(f"the schedule {schedule} has two chunks a stage; found {chunks}")
    if schedule == "dualpipe_v" and micro_batches < 2 * stages:
        raise PlanError(
            f"the schedule dualpipe_v has at least two micro-batches a stage, {2 * stages}; found {micro_batches}"
        )
    rounds = max(1, micro_batches // stages)
    if schedule in ("interleaved", "zero_bubble") and chunks > 1 and micro_batches % rounds:
        raise PlanError(
            f"the schedule {schedule} over {stages} stages runs micro-batches in {rounds} equal rounds;"
            f" {micro_batches} cannot be split so"
        )


def _gpipe(stage: int, stages: int, chunks: int, micro_batches: int) -> Iterable[Action]:
    for kind in ("forward", "backward"):
        for micro_batch in range(micro_batches):
            yield Action(kind, 0, micro_batch)


def _one_forward_one_backward(stage: int, stages: int, chunks: int, micro_batches: int) -> Iterable[Action]:
    return _alternate(chunks, micro_batches, micro_batches, warm_up=stages - 1 - stage)


def _interleaved(stage: int, stages: int, chunks: int, micro_batches: int) -> Iterable[Action]:
    size = micro_batches // max(1, micro_batches // stages)
    return _alternate(chunks, micro_batches, size, warm_up=(chunks - 1) * size + 2 * (stages - 1 - stage))


def _zero_bubble(stage: int, stages: int, chunks: int, micro_batches: int) -> Iterable[Action]:
    # Later stages put off more of their weight halves: there they fill the wait of the cool-down.
    size = micro_batches // max(1, micro_batches // stages) if chunks > 1 else micro_batches
    warm_up = (chunks - 1) * size + stages - 1 - stage
    return _alternate(chunks, micro_batches, size, warm_up, put_off=stage)


def _alternate(
    chunks: int, micro_batches: int, size: int, warm_up: int, put_off: int | None = None
) -> Iterable[Action]:
    """``warm_up`` forwards, then forward and backward in turn, then the backwards that remain.

    Micro-batches go through the stage's chunks in groups of ``size``. With ``put_off``, backwards come in halves, and
    that many weight halves are put off to the end.
    """
    groups = [
        (chunk, range(first, min(first + size, micro_batches)))
        for first in range(0, micro_batches, size)
        for chunk in range(chunks)
    ]
    forwards = [(chunk, micro_batch) for chunk, group in groups for micro_batch in group]
    backwards = [(chunks - 1 - chunk, micro_batch) for chunk, micro_batch in forwards]
    warm_up = min(warm_up, len(forwards))
    for chunk, micro_batch in forwards[:warm_up]:
        yield Action("forward", chunk, micro_batch)
    for place, (chunk, micro_batch) in enumerate(backwards):
        if warm_up + place < len(forwards):
            yield Action("forward", *forwards[warm_up + place])
        yield Action("backward" if put_off is None else "input", chunk, micro_batch)
        if put_off is not None and place >= put_off:
            yield Action("weight", *backwards[place - put_off])
    for chunk, micro_batch in backwards[-put_off:] if put_off else ():
        yield Action("weight", chunk, micro_batch)


def _zero_bubble_v(stage: int, stages: int, chunks: int, micro_batches: int) -> Iterable[Action]:
    # The pattern needs 2 x stages - 1 micro-batches; where there are fewer, the missing ones are left out of it.
    enough = max(2 * stages - 1, micro_batches)
    turn = _Turn()
    for _ in range(2 * (stages - stage) - 1):
        turn("forward", 0)
    for _ in range(stage):
        turn("forward", 1)
        turn("forward", 0)
    for _ in range(stages - stage):
        turn("forward", 1)
        turn("input", 1)
        turn("weight", 1)
    while turn.count["forward", 1] < enough:
        if turn.count["forward", 0] < enough:
            turn("forward", 0)
        turn("input", 0)
        turn("weight", 0)
        turn("forward", 1)
        turn("input", 1)
        turn("weight", 1)
    for _ in range(stage):
        turn("input", 0)
        turn("input", 1)
    for _ in range(stages - stage):
        turn("input", 0)
        turn("weight", 0)
    for chunk in (1, 0):
        while turn.count["weight", chunk] < turn.count["input", chunk]:
            turn("weight", chunk)
    return [action for action in turn.taken if action.micro_batch < micro_batches]


def _dualpipe_v(stage: int, stages: int, chunks: int, micro_batches: int) -> Iterable[Action]:
    turn = _Turn()
    behind = stages - 1 - stage
    for _ in range(2 * behind):
        turn("forward", 0)
    for _ in range(stage + 1):
        turn("forward", 0)
        turn("forward", 1)
    for _ in range(behind):
        turn("input", 1)
        turn.oldest_weight()
        turn("forward", 1)
    for _ in range(micro_batches - 2 * stages + stage + 1):
        # In the real schedule each forward overlaps with the backward after it.
        turn("forward", 0)
        turn("backward", 1)
        turn("forward", 1)
        turn("backward", 0)
    for _ in range(behind):
        turn("backward", 1)
        turn("forward", 1)
        turn("backward", 0)
    # The second half of the last backwards is split, and their weight halves fill the cool-down.
    whole = stage + 1
    for place in range(2 * (stage + 1)):
        turn("backward" if place < whole else "input", 1 - place % 2)
    for _ in range(behind):
        turn.oldest_weight()
        turn("input", 0)
    for _ in range(stage + 1):
        turn.oldest_weight()
    return turn.taken


class _Turn:
    """Takes actions and counts their micro-batches."""

    def __init__(self) -> None:
        self.taken: list[Action] = []
        self.count: dict[tuple[ActionKind, int], int] = {
            (kind, chunk): 0 for kind in ("forward", "input", "weight") for chunk in (0, 1)
        }
        self.owed: list[int] = []
        """The chunks of the input halves whose weight half is still to come, the oldest first."""

    def __call__(self, kind: ActionKind, chunk: int) -> None:
        counted: ActionKind = "input" if kind == "backward" else kind
        self.taken.append(Action(kind, chunk, self.count[counted, chunk]))
        self.count[counted, chunk] += 1
        if kind == "backward":
            self.count["weight", chunk] += 1
        elif kind == "input":
            self.owed.append(chunk)
        elif kind == "weight":
            self.owed.remove(chunk)

    def oldest_weight(self) -> None:
        if self.owed:
            self("weight", self.owed[0])


_SCHEDULES: dict[str, Callable[[int, int, int, int], Iterable[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "interleaved": _interleaved,
    "zero_bubble": _zero_bubble,
    "zero_bubble_v": _zero_bubble_v,
    "dualpipe_v": _dualpipe_v,
}

"""Whether a step may run out of memory, so that every operator of it is watched.

[Note: armed on suspicion]
Watching every operator takes about 40 microseconds for each, which is too much for every step. So a step is watched
for a reason:

- it is among the first: before the plan, and SETTLING steps after each plan;
- its batch is larger than any so far, in any dimension of any input of the model;
- the steps of its plan have reserved all but MARGIN of what this process can have of the device. Both numbers are read
  when the model is called and when its optimizer steps, so another process that takes memory is a reason too;
- one of the last WATCHED steps ran out of memory, or made the allocator return its cache to go on.

A step that gives none of these reasons and still runs out of memory is not rescued operator by operator. Where the run
has the step as a function, in a single process, it is retried as a whole. Otherwise the error is torch's own, with a
note that says what to do.

Several ranks need not have the same reasons. A rank that is watched on its own retries its operators. What only all
ranks can do together, retrying a step, they do in steps that all of them watch: the first ones, and WATCHED steps after
a query in which memory had been short on one of them (see :meth:`lowtide.adaptive.planning.Planning.compare`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from torch import Tensor

from lowtide.adaptive.clock import Clock
from lowtide.adaptive.lengths import Shape
from lowtide.units import format_bytes

__all__ = ["MARGIN", "SETTLING", "WATCHED", "Suspicion"]

SETTLING = 2
"""Steps after a plan that are watched."""
MARGIN = 1 << 20
"""Bytes; a step that leaves less of the device is suspicious. A plan leaves at least twice as much."""
WATCHED = 10
"""Steps that are watched after an OOM."""
SHAPES = 16
"""The largest batches that are remembered."""

Shapes = tuple[Shape, ...]


class Suspicion:
    """The reasons to watch a step, for the plan of each bucket of batches: see :mod:`lowtide.adaptive.lengths`."""

    def __init__(self) -> None:
        self.until = 0
        """The last step that is watched for what happened before it."""
        self.reason = ""
        """What that was."""
        self.together_until = 0
        """The last step that all ranks watch."""
        self._steps: dict[Shape, int] = {}
        """How many steps each plan has had."""
        self._peaks: dict[Shape, deque[int]] = {}
        """What the last steps of each plan have taken, in bytes."""
        self._shapes: dict[Shape, list[Shapes]] = {}
        """The largest batches of each plan's steps."""
        self._now: list[Shapes] = []
        """Those of the running step."""
        self._shortages = 0
        """How often the allocator has failed so far, or returned its cache."""

    def planned(self, bucket: Shape) -> None:
        """A bucket of batches has a new plan."""
        self._steps[bucket] = 0
        self._peaks.pop(bucket, None)
        self._shapes.pop(bucket, None)

    def is_new(self, bucket: Shape) -> bool:
        """Whether the plan of a bucket has had hardly any steps."""
        return self._steps.get(bucket, 0) < SETTLING

    def together(self, step: int) -> bool:
        """Whether all ranks watch a step, for what happened in earlier ones."""
        return step <= self.together_until

    def before(self, step: int) -> bool:
        """Whether a step is watched from its beginning on this rank, for what happened in earlier ones."""
        self._now = []
        return step <= self.until

    def short(self, bucket: Shape, clock: Clock) -> str:
        """Why memory may not suffice now for what the steps of a plan take; empty if it does."""
        peak, capacity = max(self._peaks.get(bucket, ()), default=0), clock.capacity()
        if capacity is None or peak + MARGIN <= capacity:
            return ""
        return f"steps take {format_bytes(peak)}, and this process can have {format_bytes(capacity)}"

    def at_door(self, bucket: Shape, step: int, inputs: Iterable[Tensor], clock: Clock) -> str:
        """Why a step is watched from a call of the model with these inputs on; empty if it is not."""
        if not self.is_new(bucket):
            self._look(step, clock.memory().shortages)
        shapes = tuple(tuple(one.shape) for one in inputs)
        if any(_within(shapes, other) for other in (*self._shapes.get(bucket, ()), *self._now)):
            return self.reason if step <= self.until else self.short(bucket, clock)
        self._now.append(shapes)
        largest = max(shapes, key=len, default=())
        return f"no batch so far was as large as {' x '.join(map(str, largest))}"

    def ended(self, bucket: Shape, step: int, clock: Clock, *, failed: bool) -> None:
        """A step of a plan has ended; whether an allocation failed in it."""
        if self.is_new(bucket):  # segments of earlier steps may still be reserved
            self._shortages = clock.ended_with.shortages
        else:
            several = len(self._steps) > 1  # then segments of other plans' steps may be reserved
            peak = clock.ended_with.peak_allocated if several else clock.ended_with.peak_reserved
            self._peaks.setdefault(bucket, deque(maxlen=WATCHED)).append(peak)
            self._look(step, clock.ended_with.shortages, failed=failed)
        self._steps[bucket] = self._steps.get(bucket, 0) + 1
        if self._now:
            known = [one for one in self._shapes.get(bucket, ()) if not any(_within(one, new) for new in self._now)]
            self._shapes[bucket] = [*known, *self._now][-SHAPES:]

    def _look(self, step: int, shortages: int, *, failed: bool = False) -> None:
        before, self._shortages = self._shortages, shortages
        if failed or self._shortages > before:
            self.until, self.reason = step + WATCHED, f"memory was short in step {step}"

    def all_ranks(self, step: int) -> None:
        """A rank has a reason to watch the steps that follow: all of them do."""
        self.until = self.together_until = step + WATCHED
        self.reason = self.reason or "memory is short on another rank"


def _within(shapes: Shapes, other: Shapes) -> bool:
    """Whether no input is larger than the same one of another batch."""
    return len(shapes) == len(other) and all(
        len(mine) == len(its) and all(a <= b for a, b in zip(mine, its, strict=True))
        for mine, its in zip(shapes, other, strict=True)
    )

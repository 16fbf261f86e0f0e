"""When a swapped storage leaves the device and when it comes back, as the runtime has it.

Operators are numbered through all layers in the order they run. A storage that leaves at operator p with prefetch k is
let go when operator p + k is reached, and in backward its copy back starts when operator u + k is reached again, u
being its first user in backward. Operators are noticed where they save something.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Protocol, TypeAlias

__all__ = ["IN_FLIGHT_BYTES", "Schedule", "Swapped"]

IN_FLIGHT_BYTES = 2 << 30
"""As in the runtime's limits: the most that may be on its way, in each direction."""
NEVER = 1 << 62


class Swapped:
    """A storage that is on the host between forward and backward."""

    __slots__ = ("ahead", "arrives", "awaited", "gone", "label", "left", "micro_batch", "references", "size", "source",
                 "target")  # fmt: skip

    def __init__(self, source: object, size: int, left: float, label: tuple[int | None, str], micro_batch: int) -> None:
        self.source: object | None = source
        """The storage, until it is let go."""
        self.target: object | None = None
        """The storage that it came back to."""
        self.size, self.left, self.label, self.micro_batch = size, left, label, micro_batch
        """``left`` is when the copy out ends."""
        self.arrives = 0.0
        self.awaited = self.ahead = self.gone = False
        self.references = 1


class LetGo(Protocol):
    """Lets a swapped storage's device memory go."""

    def __call__(self, swapped: Swapped) -> None: ...


_Entry: TypeAlias = tuple[int, int, Swapped]


class Schedule:
    """What is waiting for an operator to be reached."""

    __slots__ = ("base", "count", "leaving", "leaving_bytes", "let_go", "next", "now", "returning")

    def __init__(self, let_go: LetGo) -> None:
        self.let_go = let_go
        self.now = self.base = self.count = 0
        self.next = NEVER
        self.leaving: list[_Entry] = []
        self.leaving_bytes = 0
        self.returning: list[_Entry] = []

    def enter(self, offset: int) -> int:
        """The number of a layer's first operator. Numbers only grow, from forward to forward."""
        if self.base + offset < self.now:
            self.base = self.now - offset
        return self.base + offset

    def leave(self, swapped: Swapped, due: int) -> None:
        """Let the device memory go when operator ``due`` is reached, or sooner if too much is on its way."""
        self.count += 1
        heappush(self.leaving, (due, self.count, swapped))
        self.leaving_bytes += swapped.size
        self.next = min(self.next, due)
        while self.leaving_bytes > IN_FLIGHT_BYTES and self.leaving:
            self._let_go()

    def come_back(self, swapped: Swapped, due: int) -> None:
        """Start the copy back when backward reaches operator ``due``."""
        self.count += 1
        heappush(self.returning, (due, self.count, swapped))
        self.next = min(self.next, due)

    def reach(self, number: int) -> list[Swapped]:
        """Operator ``number`` runs. What has to come back when backward is here again is returned."""
        self.now = max(self.now, number)
        while self.leaving and self.leaving[0][0] <= number:
            self._let_go()
        due = []
        while self.returning and self.returning[0][0] <= number:
            due.append(heappop(self.returning)[2])
        self._look_ahead()
        return due

    def end(self, number: int, last: bool) -> list[Swapped]:
        """A layer has ended before operator ``number``. After the last one, all that is left comes back at once."""
        if self.next > number and not (last and self.returning):
            self.now = number
            return []
        due = self.reach(number)
        if last:
            due += [heappop(self.returning)[2] for _ in range(len(self.returning))]
            self._look_ahead()
        return due

    def _let_go(self) -> None:
        _, _, swapped = heappop(self.leaving)
        self.leaving_bytes -= swapped.size
        if not swapped.gone:
            self.let_go(swapped)

    def _look_ahead(self) -> None:
        self.next = min(
            self.leaving[0][0] if self.leaving else NEVER, self.returning[0][0] if self.returning else NEVER
        )

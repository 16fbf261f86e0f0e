"""When a swapped tensor's device memory is let go, and when its copy back starts.

Operators are numbered through all layers in the order they run. A tensor that leaves at operator p with prefetch k is
let go when operator p + k is reached, and in backward its copy back starts when operator u + k is reached again, u
being its first user in backward. Operators are noticed where they save something; between those nothing of ours runs.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, TypeAlias
from weakref import ReferenceType

from torch import Tensor

from lowtide.runtime.saved import Saved, unpack

if TYPE_CHECKING:
    from lowtide.runtime.swap import Swapped

__all__ = ["Schedule", "Starts", "start"]

NEVER = 1 << 62

_Entry: TypeAlias = "tuple[int, int, ReferenceType[Swapped], int]"
"""When, a number that breaks ties, what, and its bytes."""


class Starts:
    """A saved value whose return to autograd, in backward, also starts copies back."""

    __slots__ = ("saved", "swapped")

    def __init__(self, saved: Tensor | Saved, swapped: list[ReferenceType[Swapped]]) -> None:
        self.saved, self.swapped = saved, swapped

    def tensor(self) -> Tensor:
        start(self.swapped)
        return unpack(self.saved)


def start(swapped: list[ReferenceType[Swapped]]) -> None:
    """Start the copies back of what was swapped, the one that is needed first before the others."""
    while swapped:
        one = swapped.pop()()
        if one is not None:
            one.prefetch()


class Schedule:
    """What is waiting for an operator to be reached."""

    def __init__(self, in_flight_bytes: int) -> None:
        self.limit = in_flight_bytes
        self.now = self.base = self.count = 0
        self.next = NEVER
        self.leaving: list[_Entry] = []
        self.leaving_bytes = 0
        self.returning: list[_Entry] = []

    def enter(self, offset: int) -> int:
        """The number of a layer's first operator; ``offset`` is its place in the model.

        Numbers only grow: with the next forward, or a layer that runs a second time, they go on from where they are.
        """
        if self.base + offset < self.now:
            self.base = self.now - offset
        return self.base + offset

    def leave(self, swapped: ReferenceType[Swapped], size: int, due: int) -> None:
        """Let the device memory go when operator ``due`` is reached, or sooner if too much is on its way."""
        self.count += 1
        heappush(self.leaving, (due, self.count, swapped, size))
        self.leaving_bytes += size
        if due < self.next:
            self.next = due
        while self.leaving_bytes > self.limit and self.leaving:
            self._let_go()

    def come_back(self, swapped: ReferenceType[Swapped], due: int) -> None:
        """Start the copy back when backward reaches operator ``due``."""
        self.count += 1
        heappush(self.returning, (due, self.count, swapped, 0))
        if due < self.next:
            self.next = due

    def reach(self, number: int) -> list[ReferenceType[Swapped]]:
        """Operator ``number`` runs. What has to come back when backward is here again is returned."""
        if number > self.now:
            self.now = number
        while self.leaving and self.leaving[0][0] <= number:
            self._let_go()
        due = []
        while self.returning and self.returning[0][0] <= number:
            due.append(heappop(self.returning)[2])
        self.next = min(
            self.leaving[0][0] if self.leaving else NEVER, self.returning[0][0] if self.returning else NEVER
        )
        return due

    def finish(self) -> list[ReferenceType[Swapped]]:
        """The last layer has run: whatever is still to come back does so when backward begins."""
        due = [heappop(self.returning)[2] for _ in range(len(self.returning))]
        self.next = self.leaving[0][0] if self.leaving else NEVER
        return due

    def _let_go(self) -> None:
        _, _, reference, size = heappop(self.leaving)
        self.leaving_bytes -= size
        swapped = reference()
        if swapped is not None:
            swapped.release()

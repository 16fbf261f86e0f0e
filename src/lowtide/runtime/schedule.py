"""When a swapped tensor's device memory is freed, and when its reload starts.

Operators are numbered through all layers in the order they run. A tensor that is offloaded at operator p with prefetch
k is freed when operator p + k is reached, and in backward its reload starts when operator u + k is reached again, u
being its first user in backward. Operators are noticed where they save something; between those no hook of ours runs.

In backward an operator is reached when something that it saved is unpacked. Torch does not specify the order of
unpacking. Nothing but time depends on it here: what is unpacked before its reload has started is reloaded then and
waited for, and a reload of what has been unpacked already does nothing. ``tests/runtime/test_unpack_order.py`` unpacks
in random orders.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any, Protocol, TypeAlias
from weakref import ReferenceType

from torch import Tensor

from lowtide.operators.calls import tensors_of
from lowtide.operators.saved import Saved

__all__ = ["Prefetching", "Schedule", "Span"]

NEVER = 1 << 62


class Offloaded(Protocol):
    """What is scheduled."""

    def release(self) -> None:
        """Free its device memory."""

    def prefetch(self) -> None:
        """Start its reload."""


Due: TypeAlias = list[ReferenceType[Offloaded]]
"""What is to be reloaded; the last is needed first."""
_Entry: TypeAlias = tuple[int, int, ReferenceType[Offloaded], int]
"""When, a number that breaks ties, what, and its bytes."""


class Prefetching:
    """A saved value whose unpacking, in backward, also starts reloads."""

    __slots__ = ("due", "saved")

    def __init__(self, saved: Saved, due: Due) -> None:
        self.saved, self.due = saved, due

    def tensor(self) -> Tensor:
        """The saved tensor."""
        _prefetch(self.due)
        return self.saved.tensor()


def _prefetch(due: Due) -> None:
    while due:
        offloaded = due.pop()()
        if offloaded is not None:
            offloaded.prefetch()


class Schedule:
    """What waits for an operator to be reached."""

    def __init__(self, in_flight_bytes: int) -> None:
        self.limit = in_flight_bytes
        self.now = self.base = self.count = 0
        self.next = NEVER
        """The next operator at which something is due."""
        self.freeing: list[_Entry] = []
        self.freeing_bytes = 0
        self.reloading: list[_Entry] = []

    def enter(self, offset: int) -> int:
        """The number of a layer's first operator; ``offset`` is how many operators the model has before it.

        Numbers only grow: with the next forward, or a layer that runs a second time, they continue from ``now``.
        """
        if self.base + offset < self.now:
            self.base = self.now - offset
        return self.base + offset

    def free_at(self, offloaded: ReferenceType[Offloaded], size: int, due: int) -> None:
        """Free the device memory when operator ``due`` is reached, or sooner if too much is in flight."""
        self.count += 1
        heappush(self.freeing, (due, self.count, offloaded, size))
        self.freeing_bytes += size
        self.next = min(self.next, due)
        while self.freeing_bytes > self.limit and self.freeing:
            self._free()

    def reload_at(self, offloaded: ReferenceType[Offloaded], due: int) -> None:
        """Start the reload when backward reaches operator ``due``."""
        self.count += 1
        heappush(self.reloading, (due, self.count, offloaded, 0))
        self.next = min(self.next, due)

    def reach(self, number: int) -> Due:
        """Operator ``number`` runs. Returns what has to be reloaded when backward is here again."""
        self.now = max(self.now, number)
        while self.freeing and self.freeing[0][0] <= number:
            self._free()
        due = []
        while self.reloading and self.reloading[0][0] <= number:
            due.append(heappop(self.reloading)[2])
        self.next = min(
            self.freeing[0][0] if self.freeing else NEVER, self.reloading[0][0] if self.reloading else NEVER
        )
        return due

    def finish(self) -> Due:
        """The last layer has run: what is still to be reloaded is, when backward begins."""
        due = [heappop(self.reloading)[2] for _ in range(len(self.reloading))]
        self.next = self.freeing[0][0] if self.freeing else NEVER
        return due

    def prefetching(self, saved: Saved, number: int) -> Saved:
        """What to save in place of a tensor at operator ``number``: its unpacking starts what is due there."""
        due = self.reach(number) if self.next <= number else None
        return Prefetching(saved, due) if due else saved

    def _free(self) -> None:
        _, _, reference, size = heappop(self.freeing)
        self.freeing_bytes -= size
        offloaded = reference()
        if offloaded is not None:
            offloaded.release()


class Span:
    """The numbers of one layer's operators, and what happens at its ends."""

    def __init__(self, schedule: Schedule, offset: int, count: int, last: bool) -> None:
        self.schedule, self.offset, self.count, self.last = schedule, offset, count, last

    def enter(self) -> int:
        """The layer begins; the number of its first operator."""
        return self.schedule.enter(self.offset)

    def leave(self, first: int, output: Any) -> None:
        """The layer has run: what is due when backward comes here starts with the gradient of its output."""
        schedule, end = self.schedule, first + self.count
        if schedule.next > end and not (self.last and schedule.reloading):
            schedule.now = end
            return
        due = schedule.reach(end)
        if self.last:
            due += schedule.finish()
        if due:
            for tensor in tensors_of(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: _prefetch(due))
                    return

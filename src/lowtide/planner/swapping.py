"""When a swapped storage is offloaded and when it is reloaded, as the runtime does it.

Operators are numbered through all layers in the order they run. A storage that is offloaded at operator p with prefetch
k is freed when operator p + k is reached, and in backward its copy back starts when operator u + k is reached again, u
being its first user in backward. Operators are noticed where they save something.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Literal, TypeAlias

from lowtide.planner.rank import Rank, Storage
from lowtide.planner.simulation import Lane, Span
from lowtide.runtime.limits import IN_FLIGHT_BYTES

__all__ = ["IN_FLIGHT_BYTES", "Schedule", "Swapped", "Swapping"]

NEVER = 1 << 62


class Swapped:
    """A storage that is on the host between forward and backward."""

    __slots__ = (
        "ahead", "arrives", "awaited", "gone", "label", "left", "references", "size", "source", "target",
    )  # fmt: skip

    def __init__(self, source: Storage, left: float, label: tuple[int | None, str, int]) -> None:
        self.source: Storage | None = source
        """The storage, until it is freed."""
        self.target: Storage | None = None
        """The storage that it was reloaded to."""
        self.size = source.size
        self.left, self.arrives = left, 0.0
        """When the copy out ends, and when the copy back does."""
        self.label = label
        """The layer, the operator whose value it is, and the micro-batch."""
        self.awaited = self.ahead = self.gone = False
        """Whether compute has waited for the copy back; whether that is in flight ahead of time; whether
        nothing holds it any more."""
        self.references = 1
        """How many packs and captured calls refer to it."""


_Entry: TypeAlias = tuple[int, int, Swapped]


class Schedule:
    """What is waiting for an operator to be reached."""

    __slots__ = ("base", "count", "free", "leaving", "leaving_bytes", "next", "now", "returning")

    def __init__(self, free: Callable[[Swapped], None]) -> None:
        self.free = free
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
        """Free the device memory when operator ``due`` is reached, or sooner if too much is in flight."""
        self.count += 1
        heappush(self.leaving, (due, self.count, swapped))
        self.leaving_bytes += swapped.size
        self.next = min(self.next, due)
        while self.leaving_bytes > IN_FLIGHT_BYTES and self.leaving:
            self._free()

    def reload_at(self, swapped: Swapped, due: int) -> None:
        """Start the copy back when backward reaches operator ``due``."""
        self.count += 1
        heappush(self.returning, (due, self.count, swapped))
        self.next = min(self.next, due)

    def reach(self, number: int) -> list[Swapped]:
        """Operator ``number`` runs. Returns what must be reloaded when backward reaches it."""
        self.now = max(self.now, number)
        while self.leaving and self.leaving[0][0] <= number:
            self._free()
        due = []
        while self.returning and self.returning[0][0] <= number:
            due.append(heappop(self.returning)[2])
        self._look_ahead()
        return due

    def end(self, number: int, last: bool) -> list[Swapped]:
        """A layer has ended before operator ``number``. After the last one, all that is left is reloaded at once."""
        if self.next > number and not (last and self.returning):
            self.now = number
            return []
        due = self.reach(number)
        if last:
            due += [heappop(self.returning)[2] for _ in range(len(self.returning))]
            self._look_ahead()
        return due

    def _free(self) -> None:
        _, _, swapped = heappop(self.leaving)
        self.leaving_bytes -= swapped.size
        if not swapped.gone:
            self.free(swapped)

    def _look_ahead(self) -> None:
        self.next = min(
            self.leaving[0][0] if self.leaving else NEVER, self.returning[0][0] if self.returning else NEVER
        )


class Swapping:
    """All that one device swaps."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.schedules: dict[int, Schedule] = {}
        self.schedule = self.of_chunk(0)
        """That of the chunk that is running: each is a model of its own, with its own operators."""
        self.returning_bytes = 0
        """Of copies back that were started ahead of time and not used yet."""
        self.host_bytes = self.host_peak = self.moved = 0

    def of_chunk(self, chunk: int) -> Schedule:
        """From now on, a chunk of the stage is running."""
        self.schedule = self.schedules.setdefault(chunk, Schedule(self._free))
        return self.schedule

    def send(self, storage: Storage, label: tuple[int | None, str, int]) -> Swapped:
        """Start the copy out."""
        storage.count += 1
        storage.is_saved(label[1])
        start, end = self.rank.lanes.copy(storage.size, "link out")
        swapped = Swapped(storage, end, label)
        self._show("copy out", swapped, start, end)
        self.moved += storage.size
        self.host_bytes += storage.size
        self.host_peak = max(self.host_peak, self.host_bytes)
        return swapped

    def start(self, due: list[Swapped]) -> None:
        """Start copies back, the one that is needed first before the others."""
        while due:
            swapped = due.pop()
            here = swapped.gone or swapped.source is not None or swapped.target is not None
            if here or self.returning_bytes + swapped.size > IN_FLIGHT_BYTES:
                continue
            self._bring_back(swapped)
            swapped.ahead = True
            self.returning_bytes += swapped.size

    def use(self, swapped: Swapped) -> Storage:
        """The storage on the device, for compute that is ordered after its copy back."""
        if swapped.source is not None:
            return swapped.source
        target = swapped.target or self._bring_back(swapped)
        self._arrive(swapped)
        return target

    def leave(self, swapped: Swapped) -> None:
        """One reference less; with the last one it is freed."""
        swapped.references -= 1
        if swapped.references:
            return
        swapped.gone = True
        self._free(swapped)
        if swapped.target is not None:
            self._arrive(swapped)
            self.rank.drop(swapped.target)
        self.host_bytes -= swapped.size

    def forget(self, swapped: Swapped) -> None:
        """A backward has ended and its graph is kept: what was reloaded is freed."""
        if swapped.target is not None:
            self._arrive(swapped)
            self.rank.drop(swapped.target)
            swapped.target, swapped.awaited = None, False

    def _free(self, swapped: Swapped) -> None:
        source, swapped.source = swapped.source, None
        if source is not None:
            self.rank.wait(swapped.left, *swapped.label)
            self.rank.drop(source)

    def _bring_back(self, swapped: Swapped) -> Storage:
        swapped.target = storage = self.rank.make(swapped.size)
        storage.what, storage.layer, storage.operator = "activations", *swapped.label[:2]
        start, swapped.arrives = self.rank.lanes.copy(swapped.size, "link in", after=swapped.left)
        self._show("copy back", swapped, start, swapped.arrives)
        return storage

    def _arrive(self, swapped: Swapped) -> None:
        if swapped.ahead:
            swapped.ahead = False
            self.returning_bytes -= swapped.size
        if not swapped.awaited:
            swapped.awaited = True
            self.rank.wait(swapped.arrives, *swapped.label)

    def _show(self, kind: Literal["copy out", "copy back"], swapped: Swapped, start: float, end: float) -> None:
        if self.rank.spans is not None:
            lane: Lane = "link out" if kind == "copy out" else "link in"
            self.rank.spans.append(Span(lane, start, end - start, kind, *swapped.label, swapped.size))

"""The clocks of one device: the host that issues work, its streams, collectives, and the link in both directions.

Work is issued in the program's order. A kernel starts when it has been issued and the one before it on its stream has
ended; a copy when it has been issued, the computation has come to where it was issued, and the copy before it has
ended. A collective starts when its stream has come to it and the one before it in its group has ended. What waits for
copies and collectives is a stream, never the host. So memory does not depend on time, and time follows from these
clocks.
"""

from __future__ import annotations

from typing import Protocol

from lowtide.cost.device import Device
from lowtide.cost.kernel import copy_seconds
from lowtide.planner.simulation import Lane, Span
from lowtide.trace.trace import Sync

__all__ = ["Issued", "Lanes"]


class Issued(Protocol):
    """A kernel, as far as the clocks go."""

    @property
    def seconds(self) -> float:
        """How long it takes."""

    @property
    def stream(self) -> int:
        """The stream that it is issued on."""

    @property
    def group(self) -> str:
        """The group of a collective; empty for anything else."""

    @property
    def waited(self) -> bool:
        """Whether its stream waits for it at once."""


class Lanes:
    """The clocks, in seconds since the step began."""

    __slots__ = ("back", "busy", "computation", "device", "events", "host", "out", "spans", "stall", "streams")

    def __init__(self, device: Device, spans: list[Span] | None = None) -> None:
        self.device, self.spans = device, spans
        self.host = self.computation = self.out = self.back = 0.0
        self.busy = self.stall = 0.0
        """Seconds of kernels, and seconds that the computation waited for copies."""
        self.streams: dict[int, float] = {}
        """The streams other than the computation, which is 0."""
        self.events: dict[str, float] = {}
        """The times of events that were recorded, and of the last collective of each group."""

    def run(self, kernel: Issued) -> float:
        """Issue a kernel; when it starts."""
        self.host += self.device.launch
        start = self.computation if self.computation > self.host else self.host
        if kernel.stream == 0 and not kernel.group:  # nearly all of them
            self.computation = start + kernel.seconds
            self.busy += kernel.seconds
            return start
        start = max(self.at(kernel.stream), self.host, self.events.get(kernel.group, 0.0))
        end = start + kernel.seconds
        if kernel.group:
            self.events[kernel.group] = end
        if kernel.waited:
            self._reach(kernel.stream, end)
            self.busy += kernel.seconds if kernel.stream == 0 else 0.0
        return start

    def at(self, stream: int) -> float:
        """When a stream has done what it was given."""
        return self.streams.get(stream, 0.0) if stream else self.computation

    def _reach(self, stream: int, time: float) -> None:
        """A stream goes no further before that."""
        if stream:
            self.streams[stream] = max(self.streams.get(stream, 0.0), time)
        else:
            self.computation = max(self.computation, time)

    def sync(self, sync: Sync) -> None:
        """A stream records an event, or waits."""
        if not sync.waits:
            self.events[sync.channel] = max(self.at(sync.stream), self.host)
        elif sync.other >= 0:
            self._reach(sync.stream, self.at(sync.other))
        else:
            self._reach(sync.stream, self.events.get(sync.channel, 0.0))

    def copy(self, size: int, lane: Lane, after: float = 0.0) -> tuple[float, float]:
        """Issue a copy of ``size`` bytes that comes after the computation so far; when it starts and ends."""
        ready = max(self.computation, self.host, after)
        self.host += self.device.launch
        if lane == "link out":
            start = max(self.out, ready, self.host)
            self.out = end = start + copy_seconds(self.device, size, "out")
        else:
            start = max(self.back, ready, self.host)
            self.back = end = start + copy_seconds(self.device, size, "in")
        return start, end

    def wait(self, until: float) -> float:
        """The computation waits for a copy; how long it could have gone on otherwise."""
        free = max(self.computation, self.host)
        waited = until - free if until > free else 0.0
        if until > self.computation:
            self.computation = until
        self.stall += waited
        return waited

    def synchronize(self) -> None:
        """The host waits for the computation."""
        self.host = max(self.host, self.computation)

    def drain(self) -> None:
        """The host waits for all that the device was given."""
        self.host = max(self.host, self.computation, self.out, self.back, *self.streams.values())

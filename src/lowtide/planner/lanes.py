"""The clocks of one device: the host that issues work, compute, and the link in both directions.

Work is issued in the program's order. A kernel starts when it has been issued and the one before it has ended; a copy
when it has been issued, the computation has come to where it was issued, and the copy before it has ended. What waits
for a copy is the computation, never the host. So memory does not depend on time, and time follows from these clocks.
"""

from __future__ import annotations

from lowtide.cost.device import Device
from lowtide.cost.kernel import copy_seconds
from lowtide.planner.simulation import Lane, Span

__all__ = ["Lanes"]


class Lanes:
    """Four clocks, in seconds since the step began."""

    __slots__ = ("back", "busy", "computation", "device", "host", "out", "spans", "stall")

    def __init__(self, device: Device, spans: list[Span] | None = None) -> None:
        self.device, self.spans = device, spans
        self.host = self.computation = self.out = self.back = 0.0
        self.busy = self.stall = 0.0
        """Seconds of kernels, and seconds that the computation waited for copies."""

    def run(self, seconds: float) -> float:
        """Issue a kernel; when it starts."""
        self.host += self.device.launch
        start = self.computation if self.computation > self.host else self.host
        self.computation = start + seconds
        self.busy += seconds
        return start

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

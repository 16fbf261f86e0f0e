"""What a step takes of its device: seconds by its own clock, without waiting for it, and memory."""

from __future__ import annotations

from typing import Any

import torch

from lowtide.adaptive.machine import available_capacity
from lowtide.cost.stopwatch import moment, seconds_between

__all__ = ["Clock"]


class Clock:
    """Moments of a device: events on its stream, or the time of day on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> Any:
        """This moment, when all that was issued before it has run."""
        return moment(self.device)

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two moments; waits for the second."""
        if not isinstance(end, float):
            end.synchronize()
        return seconds_between(begin, end)

    def reset_peak(self) -> None:
        """Forget the peak of the device's memory."""
        if self.device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self.device)

    def empty_cache(self) -> None:
        """Give back what the allocator holds and nobody uses."""
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()

    def peak_reserved(self) -> int:
        """The most that the allocator held of the device since; 0 on a CPU, which has no such allocator."""
        return 0 if self.device.type == "cpu" else int(torch.accelerator.max_memory_reserved(self.device))

    def peak_allocated(self) -> int:
        """The most that was in use of it; 0 on a CPU."""
        return 0 if self.device.type == "cpu" else int(torch.accelerator.max_memory_allocated(self.device))

    def capacity(self) -> int | None:
        """What this process can have of the device; None on a CPU, whose memory is nobody's to plan."""
        return None if self.device.type == "cpu" else available_capacity(self.device)

"""What a step takes of its device: seconds by the device's own clock, without waiting for it, and memory."""

from __future__ import annotations

from typing import Any

import torch

from lowtide._torch_private.memory import MemoryStats, memory_stats
from lowtide.adaptive.machine import available_capacity
from lowtide.adaptive.record import AdaptStep, Phase
from lowtide.cost.stopwatch import moment, seconds_between

__all__ = ["Clock"]

_NOTHING = MemoryStats(0, 0, 0, 0, 0)


class Clock:
    """Times steps and reads the allocator's peaks. A CPU has no such allocator: its peaks are 0."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_cpu = device.type == "cpu"
        self._begin: Any = None
        self._stats: MemoryStats | None = None
        self._capacity: int | None = None
        """What was read last; asking takes as long as some operators."""
        self.begun_with = 0
        """The bytes that were allocated when the step began."""
        self.ended_with = _NOTHING
        """What the last step that has ended took."""
        self._ended: tuple[Any, Any, AdaptStep] | None = None
        """The last step, with the moments of its beginning and end; the device may still be running it."""

    def begin(self) -> None:
        """A step begins."""
        if not self._on_cpu:
            torch.accelerator.reset_peak_memory_stats(self.device)
            self.look_again()
            self.begun_with = self.memory().allocated
        self._begin = moment(self.device)

    def end(self, number: int, phase: Phase, rescued: int) -> None:
        """A step has ended on the host."""
        self.look_again()
        found = self.ended_with = self.memory()
        step = AdaptStep(number, 0.0, found.peak_reserved, phase, rescued, found.peak_allocated)
        self._ended = self._begin, moment(self.device), step

    def last(self) -> AdaptStep | None:
        """The last step with its seconds, once; None if there is none. Waits until the device has reached its end."""
        if self._ended is None:
            return None
        begin, end, step = self._ended
        self._ended = None
        if not isinstance(end, float):
            end.synchronize()
        return step._replace(seconds=seconds_between(begin, end))

    def empty_cache(self) -> None:
        """Return the allocator's unused segments to the device."""
        if not self._on_cpu:
            torch.accelerator.empty_cache()

    def look_again(self) -> None:
        """Let memory and capacity be read when they are next asked for: time has passed."""
        self._stats = self._capacity = None

    def memory(self) -> MemoryStats:
        """What this process has of the device, with the peaks since the step began."""
        if self._on_cpu:
            return _NOTHING
        if self._stats is None:
            self._stats = memory_stats(self.device)
        return self._stats

    def capacity(self) -> int | None:
        """The bytes of the device that this process can have; None on a CPU, whose memory is not planned."""
        if self._on_cpu:
            return None
        if self._capacity is None:
            self._capacity = available_capacity(self.device, self.memory().reserved)
        return self._capacity

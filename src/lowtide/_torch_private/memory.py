"""The allocator's statistics, without the dictionary that torch makes of all of them: a tenth of the time."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lowtide._torch_private.needed import needed_for

with needed_for("reading a device's memory statistics"):
    from torch._C import _accelerator_getDeviceStats, _accelerator_isAllocatorInitialized

__all__ = [
    "MemoryStats",
    "memory_stats",
]


class MemoryStats(NamedTuple):
    """What this process has of a device, in bytes."""

    allocated: int
    peak_allocated: int
    reserved: int
    peak_reserved: int
    shortages: int
    """How often the allocator has failed, or had to return its unused segments to the device first."""


def memory_stats(device: torch.device) -> MemoryStats:
    """The statistics of an accelerator, as ``torch.accelerator.memory_stats`` has them; 0 before its first use."""
    if not _accelerator_isAllocatorInitialized():
        return MemoryStats(0, 0, 0, 0, 0)
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    found = _accelerator_getDeviceStats(index)
    allocated, reserved = found["allocated_bytes"]["all"], found["reserved_bytes"]["all"]
    return MemoryStats(
        allocated["current"],
        allocated["peak"],
        reserved["current"],
        reserved["peak"],
        found["num_alloc_retries"] + found["num_ooms"],
    )

"""Memory that the allocator has reserved and that no step uses: how much it is, and what helps."""

from __future__ import annotations

import os
from collections import deque

from lowtide._torch_private.memory import MemoryStats
from lowtide.units import format_bytes

__all__ = ["Fragmentation"]

STEPS = 20
"""Planned steps that are looked at."""
SHARE = 0.05
"""Of the memory that this process can have; less that is not in use is not worth a word."""
_VARIABLES = {"cuda": ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), "npu": ("PYTORCH_NPU_ALLOC_CONF",)}
"""Where a device's allocator takes its settings from."""


class Fragmentation:
    """Says once how much was reserved and not in use in every one of the last steps."""

    def __init__(self) -> None:
        self._unused: deque[int] = deque(maxlen=STEPS)
        self._said = False

    def ended(self, memory: MemoryStats, capacity: int | None, device: str) -> str:
        """A planned step has ended; what there is to say about it, once."""
        self._unused.append(memory.peak_reserved - memory.peak_allocated)
        unused = min(self._unused)
        if self._said or capacity is None or len(self._unused) < STEPS or unused < SHARE * capacity:
            return ""
        self._said = True
        text = (
            f"{format_bytes(unused)} were reserved and not in use in each of the last {STEPS} steps,"
            f" {unused / capacity:.0%} of what this process can have"
        )
        names = _VARIABLES.get(device, ())
        settings = " ".join(os.environ.get(name, "") for name in names)
        if not names or "expandable_segments:True" in settings:
            return text
        return f"{text}: start the run with {names[0]}=expandable_segments:True, and a plan can use most of it"

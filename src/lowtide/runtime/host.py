"""Host memory that swapped tensors go to: buffers that are pinned where the device has it, and used again."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["HostBuffer", "HostPool"]

PAGE = 4096


class HostBuffer:
    """A piece of host memory, seen as whatever tensor it holds now."""

    __slots__ = ("available", "bytes", "size", "views")

    def __init__(self, memory: Tensor) -> None:
        self.bytes = memory
        self.size = memory.numel()
        self.available: torch.Event | None = None
        """The copy that read this buffer last; whoever writes to it next waits for that first."""
        self.views: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def view(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The buffer's first bytes as a contiguous tensor."""
        key = (shape, dtype)
        found = self.views.get(key)
        if found is None:
            if len(self.views) > 16:  # shapes that change every step must not pile up
                self.views.clear()
            size = shape.numel() * dtype.itemsize
            found = self.views[key] = self.bytes[:size].view(dtype).view(shape)
        return found


class HostPool:
    """Buffers by size class, up to a limit. Allocating pinned memory takes milliseconds, so none is given back."""

    def __init__(self, limit: int, *, pinned: bool) -> None:
        self.limit, self.pinned = limit, pinned
        self.taken = 0
        self.free: dict[int, list[HostBuffer]] = {}

    def get(self, size: int) -> HostBuffer | None:
        """A buffer of at least ``size`` bytes; None if the limit is reached or there is no such memory."""
        size = _size_class(size)
        waiting = self.free.get(size)
        if waiting:
            return waiting.pop()
        if self.taken + size > self.limit and not self._make_room(size):
            return None
        try:
            memory = torch.empty(size + (0 if self.pinned else PAGE), dtype=torch.uint8, pin_memory=self.pinned)
        except RuntimeError:  # the machine's limit is lower than ours
            return None
        self.taken += size
        start = -memory.data_ptr() % PAGE  # direct input and output wants whole pages
        return HostBuffer(memory[start : start + size] if start + size <= memory.numel() else memory)

    def put(self, buffer: HostBuffer) -> None:
        """Give a buffer back."""
        self.free.setdefault(buffer.size, []).append(buffer)

    def _make_room(self, size: int) -> bool:
        """Drop waiting buffers of other sizes, largest first, until ``size`` more fits."""
        for waiting in sorted(self.free, reverse=True):
            while self.free[waiting] and self.taken + size > self.limit:
                self.free[waiting].pop()
                self.taken -= waiting
        return self.taken + size <= self.limit


def _size_class(size: int) -> int:
    """Powers of two, as the devices' own allocators of pinned memory round."""
    return max(PAGE, 1 << (size - 1).bit_length())

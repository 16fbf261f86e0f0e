"""Host memory that swapped tensors go to: buffers that are pinned where the device has it, and used again."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

__all__ = ["HostBuffer", "HostPool"]

PAGE = 4096


class HostBuffer:
    """A piece of host memory, seen as the tensor it holds."""

    __slots__ = ("available", "bytes", "dtype", "memory", "shape", "size")

    def __init__(self, memory: Tensor) -> None:
        self.bytes = self.memory = memory
        self.shape, self.dtype = memory.shape, memory.dtype
        self.size = memory.numel()
        self.available: torch.Event | None = None
        """The copy that used this buffer last; the next one waits for that first."""

    def shape_as(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """See the buffer's first bytes as a contiguous tensor."""
        if self.shape != shape or self.dtype is not dtype:
            self.memory = self.bytes[: shape.numel() * dtype.itemsize].view(dtype).view(shape)
            self.shape, self.dtype = shape, dtype
        return self.memory


class HostPool:
    """Buffers by size class, up to a limit. Allocating pinned memory takes milliseconds, so it is not given back.

    Each operator keeps the buffers it used in a stash of its own, where the next step finds them in the right shape.
    The disk's threads ask for buffers as well, so counting and taking hold the lock.
    """

    def __init__(self, limit: int, *, pinned: bool) -> None:
        self.limit, self.pinned = limit, pinned
        self.taken = 0
        self.lock = threading.Lock()
        self.stashes: list[list[HostBuffer]] = []

    def get(self, stash: list[HostBuffer], shape: torch.Size, dtype: torch.dtype, size: int) -> HostBuffer | None:
        """A buffer for a tensor of ``size`` bytes; None if the limit is reached or there is no such memory."""
        with self.lock:
            if stash:
                buffer = stash.pop()
                if buffer.shape == shape and buffer.dtype is dtype:
                    return buffer
                if buffer.size >= size:
                    buffer.shape_as(shape, dtype)
                    return buffer
                stash.append(buffer)
            found = self._new(stash, size)
        if found is not None:
            found.shape_as(shape, dtype)
        return found

    def _new(self, stash: list[HostBuffer], size: int) -> HostBuffer | None:
        if not any(known is stash for known in self.stashes):
            self.stashes.append(stash)
        size = _size_class(size)
        if self.taken + size > self.limit and not self._make_room(size):
            return None
        try:
            memory = torch.empty(
                size + (0 if self.pinned else PAGE), dtype=torch.uint8, device="cpu", pin_memory=self.pinned
            )
        except RuntimeError:  # the machine's limit is lower than ours
            return None
        self.taken += size
        start = -memory.data_ptr() % PAGE  # direct input and output wants whole pages
        return HostBuffer(memory[start : start + size] if start + size <= memory.numel() else memory)

    def _make_room(self, size: int) -> bool:
        """Free unused buffers until ``size`` more fits."""
        for stash in self.stashes:
            while stash and self.taken + size > self.limit:
                self.taken -= stash.pop().size
        return self.taken + size <= self.limit


def _size_class(size: int) -> int:
    """Powers of two, as the devices' own allocators of pinned memory round; small changes of shape fit again."""
    return max(PAGE, 1 << (size - 1).bit_length())

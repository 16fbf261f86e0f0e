"""Copies between a device and its host, overlapped with compute.

[Note: ordering]
One stream offloads tensors, one reloads them; the compute stream is asked for at every use, since inside a stream
context it would be the copy's own. The edges, each of which was a silent corruption in some library:

- An offload waits for the compute stream, which has just written the tensor, and for the copy that last read its
  buffer.
- The tensor's device memory is freed only after the compute stream waits for the offload. From then on whatever takes
  the memory next, on the compute stream, comes after the copy.
- A reload waits for that buffer's offload, and for the compute stream: its target is allocated on the compute stream,
  from memory that earlier kernels may still be using.
- Any stream that uses the target waits for the reload first. A target that was never used is freed only after the
  compute stream waits for the copy as well.
- Memory goes back to the stream that it was allocated on. A graph can be freed anywhere, in another stream's context or
  on another thread, so each copy knows the compute stream at the time it was issued, and that is the one that waits. A
  target that is used on yet another stream is recorded there: the one case where nothing else helps.
- A buffer is reused when the copy that read it is done; the next offload waits for that on its own stream.

All of these are waits of one stream for another. The host waits for nothing and queries no event, so the memory does
not depend on how fast the host is.

A stream remembers the one it replaced in itself, for all threads. The disk's threads copy as well, so only one thread
at a time is inside a copy stream: compute must not find itself on another thread's stream afterwards.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

__all__ = ["Copy", "Transfer"]


class Copy:
    """A copy that was issued."""

    __slots__ = ("awaited", "begin", "compute", "end")

    def __init__(self, begin: torch.Event, end: torch.Event, compute: torch.Stream) -> None:
        self.begin, self.end = begin, end
        self.compute = compute
        """The stream whose device memory it reads or writes."""
        self.awaited: list[torch.Stream] = []
        """The streams that have waited for it."""


class Transfer:
    """The two directions of one device's link."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.outward, self.inward = torch.Stream(device), torch.Stream(device)
        self.lock = threading.Lock()

    def settle(self) -> None:
        """Wait for all copies: one was interrupted, and may or may not have been issued."""
        self.outward.synchronize()
        self.inward.synchronize()

    def compute(self) -> torch.Stream:
        """The current compute stream."""
        return torch.accelerator.current_stream(self.device)

    def offload(self, source: Tensor, target: Tensor, available: torch.Event | None) -> Copy:
        """Copy ``source`` to the host. ``available`` is the copy that read the target's buffer last."""
        compute = self.compute()
        self.outward.wait_stream(compute)
        if available is not None:
            self.outward.wait_event(available)
        return self._copy(self.outward, source, target, compute)

    def reload(
        self,
        source: Tensor,
        target: Tensor,
        written: torch.Event | None,
        ready: tuple[torch.Stream, torch.Event] | None = None,
    ) -> Copy:
        """Copy ``source`` to the device. ``written`` is the copy that filled the source's buffer.

        ``ready`` is the compute stream and an event after the target's allocation, if that was on another thread.
        """
        if ready is None:
            compute = self.compute()
            self.inward.wait_stream(compute)
        else:
            compute, allocated = ready
            self.inward.wait_event(allocated)
        if written is not None:
            self.inward.wait_event(written)
        return self._copy(self.inward, source, target, compute)

    def _copy(self, stream: torch.Stream, source: Tensor, target: Tensor, compute: torch.Stream) -> Copy:
        begin, end = torch.Event(self.device, enable_timing=True), torch.Event(self.device, enable_timing=True)
        with self.lock, stream:
            begin.record(stream)
            target.copy_(source, non_blocking=True)
            end.record(stream)
        return Copy(begin, end, compute)

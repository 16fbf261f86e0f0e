"""Copies between a device and its host, beside the computation.

[Note: ordering]
One stream takes tensors out, one brings them back; the computation's stream is asked for at every use, since inside a
stream's context it would be the copy's own. The edges, each of which was somebody's silent corruption:

- A copy out waits for the computation, which has just written the tensor, and for the copy that last read its buffer.
- The tensor's memory is let go only after the computation waits for the copy out. From then on whatever takes the
  memory next, on the computation's stream, comes after the copy.
- A copy back waits for that buffer's copy out, and for the computation: its target is allocated on the computation's
  stream, from memory that earlier kernels may still be using.
- Whoever uses the target waits for the copy back first, on the stream it runs on. A target that nobody used is let go
  only after the computation waits for the copy as well.
- Memory goes back to the stream that it was allocated on. A graph can end anywhere, in another stream's context or on
  another thread, so each copy knows the stream that computed when it was issued, and that is the one that waits. A
  target that is used on yet another stream is recorded there: the one place where there is no other way.
- A buffer is used again when the copy that read it is done; the next copy out waits for that on its own stream.

All of these are waits of one stream for another. The host waits for nothing, asks for no event's state, and so the
memory does not depend on how fast the host is.

A stream remembers the one it replaced in itself, for all threads. The disk's threads copy as well, so only one thread
at a time is inside a copy's stream: a computation must not find itself on another's stream afterwards.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

__all__ = ["Copy", "Transfer"]


class Copy:
    """A copy under way."""

    __slots__ = ("awaited", "begin", "computation", "end")

    def __init__(self, begin: torch.Event, end: torch.Event, computation: torch.Stream) -> None:
        self.begin, self.end = begin, end
        self.computation = computation
        """The stream whose device memory it reads or writes."""
        self.awaited: list[torch.Stream] = []
        """The streams that come after it."""


class Transfer:
    """The two directions of one device's link."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.outward, self.inward = torch.Stream(device), torch.Stream(device)
        self.lock = threading.Lock()

    def settle(self) -> None:
        """Wait for all copies: one was interrupted, and nobody knows whether it is under way."""
        self.outward.synchronize()
        self.inward.synchronize()

    def computation(self) -> torch.Stream:
        """The stream that computes now."""
        return torch.accelerator.current_stream(self.device)

    def copy_out(self, source: Tensor, target: Tensor, available: torch.Event | None) -> Copy:
        """Copy ``source`` to the host. ``available`` is the copy that read the target's buffer last."""
        computation = self.computation()
        self.outward.wait_stream(computation)
        if available is not None:
            self.outward.wait_event(available)
        return self._copy(self.outward, source, target, computation)

    def copy_back(
        self,
        source: Tensor,
        target: Tensor,
        written: torch.Event | None,
        ready: tuple[torch.Stream, torch.Event] | None = None,
    ) -> Copy:
        """Copy ``source`` to the device. ``written`` is the copy that filled the source's buffer.

        ``ready`` is the computation and where it stood when the target was allocated, if that was on another thread.
        """
        if ready is None:
            computation = self.computation()
            self.inward.wait_stream(computation)
        else:
            computation, stood = ready
            self.inward.wait_event(stood)
        if written is not None:
            self.inward.wait_event(written)
        return self._copy(self.inward, source, target, computation)

    def _copy(self, stream: torch.Stream, source: Tensor, target: Tensor, computation: torch.Stream) -> Copy:
        begin, end = torch.Event(self.device, enable_timing=True), torch.Event(self.device, enable_timing=True)
        with self.lock, stream:
            begin.record(stream)
            target.copy_(source, non_blocking=True)
            end.record(stream)
        return Copy(begin, end, computation)

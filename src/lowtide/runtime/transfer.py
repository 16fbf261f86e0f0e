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
- A buffer is used again when the copy that read it is done; the next copy out waits for that on its own stream.

All of these are waits of one stream for another. The host waits for nothing, asks for no event's state, and so the
memory does not depend on how fast the host is.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Copy", "Transfer"]


class Copy:
    """A copy under way."""

    __slots__ = ("begin", "end")

    def __init__(self, begin: torch.Event, end: torch.Event) -> None:
        self.begin, self.end = begin, end


class Transfer:
    """The two directions of one device's link."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.outward, self.inward = torch.Stream(device), torch.Stream(device)

    def computation(self) -> torch.Stream:
        """The stream that computes now."""
        return torch.accelerator.current_stream(self.device)

    def copy_out(self, source: Tensor, target: Tensor, available: torch.Event | None) -> Copy:
        """Copy ``source`` to the host. ``available`` is the copy that read the target's buffer last."""
        self.outward.wait_stream(self.computation())
        if available is not None:
            self.outward.wait_event(available)
        return self._copy(self.outward, source, target)

    def copy_back(
        self, source: Tensor, target: Tensor, written: torch.Event | None, ready: torch.Event | None = None
    ) -> Copy:
        """Copy ``source`` to the device. ``written`` is the copy that filled the source's buffer.

        ``ready`` is where the computation stood when the target was allocated, if that was on another thread.
        """
        if ready is None:
            self.inward.wait_stream(self.computation())
        else:
            self.inward.wait_event(ready)
        if written is not None:
            self.inward.wait_event(written)
        return self._copy(self.inward, source, target)

    def _copy(self, stream: torch.Stream, source: Tensor, target: Tensor) -> Copy:
        begin, end = torch.Event(self.device, enable_timing=True), torch.Event(self.device, enable_timing=True)
        with stream:
            begin.record(stream)
            target.copy_(source, non_blocking=True)
            end.record(stream)
        return Copy(begin, end)

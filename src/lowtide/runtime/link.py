"""The link between a device and its host: copies both ways, counted and timed."""

from __future__ import annotations

from time import perf_counter

import torch
from torch import Tensor

from lowtide._torch_private.profiler import profiler_range
from lowtide.runtime.host import HostBuffer, HostPool
from lowtide.runtime.ledger import Ledger, Line
from lowtide.runtime.transfer import Copy, Transfer

__all__ = ["Link"]


class Link:
    """The link between one device and host memory. Between the host and itself a copy is synchronous."""

    def __init__(self, device: torch.device, pool: HostPool, ledger: Ledger) -> None:
        self.transfer = Transfer(device) if device.type != "cpu" else None
        self.pool, self.ledger = pool, ledger

    def settle(self) -> None:
        """Wait for all copies, after one was interrupted: then what they read or write may be freed."""
        if self.transfer is not None:
            self.transfer.settle()

    def offload(self, source: Tensor, buffer: HostBuffer, line: Line) -> Copy | None:
        """Copy ``source`` into a buffer."""
        with profiler_range(f"lowtide::swap out {line.operator}"):
            if self.transfer is None:
                begin = perf_counter()
                buffer.memory.copy_(source)
                line.copy_seconds += perf_counter() - begin
                return None
            copy = self.transfer.offload(source, buffer.memory, buffer.available)
        buffer.available = copy.end
        self.ledger.took(line, "copy_seconds", copy.begin, copy.end)
        return copy

    def reload(
        self,
        target: Tensor,
        buffer: HostBuffer,
        line: Line,
        written: Copy | None,
        ready: tuple[torch.Stream, torch.Event] | None = None,
    ) -> Copy | None:
        """Copy a buffer into ``target``."""
        with profiler_range(f"lowtide::swap in {line.operator}"):
            if self.transfer is None:
                begin = perf_counter()
                target.copy_(buffer.memory)
                line.copy_seconds += perf_counter() - begin
                return None
            event = written.end if written is not None else None
            copy = self.transfer.reload(buffer.memory, target, event, ready)
        buffer.available = copy.end
        self.ledger.took(line, "copy_seconds", copy.begin, copy.end)
        return copy

    def wait_reload(self, copy: Copy | None, target: Tensor, line: Line) -> None:
        """The stream that is about to use the target waits for its copy."""
        if copy is None:
            return
        assert self.transfer is not None
        user = self.transfer.compute()
        if user in copy.awaited:
            return
        if not copy.awaited:
            arrived = torch.Event(self.transfer.device, enable_timing=True)
            arrived.record(user)
            self.ledger.took(line, "stall_seconds", arrived, copy.end)
        user.wait_event(copy.end)
        copy.awaited.append(user)
        if user != copy.compute:
            copy.compute.wait_event(copy.end)
            target.record_stream(user)

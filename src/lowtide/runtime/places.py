"""Where a swapped tensor's bytes are while it is away: in host memory, or on disk."""

from __future__ import annotations

from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowtide.runtime.disk import DiskFile, Extent, Task
from lowtide.runtime.host import HostBuffer, HostPool
from lowtide.runtime.ledger import Ledger, Line
from lowtide.runtime.transfer import Copy, Transfer

if TYPE_CHECKING:
    from lowtide.runtime.swap import Swapped

__all__ = ["DiskPlace", "HostPlace", "Link"]


class Link:
    """The way between one device and the host's memory. On the host itself a swap is a plain copy."""

    def __init__(self, device: torch.device, pool: HostPool, ledger: Ledger) -> None:
        self.transfer = Transfer(device) if device.type != "cpu" else None
        self.pool, self.ledger = pool, ledger

    def settle(self) -> None:
        """Wait for all copies, after one was interrupted: what it reads or writes may be let go then."""
        if self.transfer is not None:
            self.transfer.settle()

    def copy_out(self, source: Tensor, buffer: HostBuffer, line: Line) -> Copy | None:
        """Copy ``source`` into a buffer."""
        if self.transfer is None:
            begin = perf_counter()
            buffer.memory.copy_(source)
            line.copy_seconds += perf_counter() - begin
            return None
        copy = self.transfer.copy_out(source, buffer.memory, buffer.available)
        buffer.available = copy.end
        self.ledger.took(line, "copy_seconds", copy.begin, copy.end)
        return copy

    def wait_out(self, written: Copy | None) -> None:
        """The computation, whose memory is let go, waits for a copy out."""
        if written is not None:
            written.computation.wait_event(written.end)

    def copy_back(
        self,
        swapped: Swapped,
        buffer: HostBuffer,
        written: Copy | None,
        ready: tuple[torch.Stream, torch.Event] | None = None,
    ) -> None:
        """Copy a buffer into ``swapped.target``."""
        assert swapped.target is not None
        if self.transfer is None:
            begin = perf_counter()
            swapped.target.copy_(buffer.memory)
            swapped.line.copy_seconds += perf_counter() - begin
            return
        event = written.end if written is not None else None
        copy = self.transfer.copy_back(buffer.memory, swapped.target, event, ready)
        buffer.available = copy.end
        self.ledger.took(swapped.line, "copy_seconds", copy.begin, copy.end)
        swapped.back = copy

    def wait_back(self, swapped: Swapped) -> None:
        """The stream that is about to use the target waits for the copy back."""
        back = swapped.back
        if back is None:
            return
        assert self.transfer is not None
        user = self.transfer.computation()
        if user in back.awaited:
            return
        if not back.awaited:
            arrived = torch.Event(self.transfer.device, enable_timing=True)
            arrived.record(user)
            self.ledger.took(swapped.line, "stall_seconds", arrived, back.end)
        user.wait_event(back.end)
        back.awaited.append(user)
        if user != back.computation:
            assert swapped.target is not None
            back.computation.wait_event(back.end)
            swapped.target.record_stream(user)

    def let_go(self, swapped: Swapped) -> None:
        """The computation, whose memory the target is, waits for the copy back if nobody has."""
        back, swapped.back = swapped.back, None
        if back is not None and not back.awaited:
            back.computation.wait_event(back.end)


class HostPlace:
    """A buffer of host memory."""

    __slots__ = ("buffer", "line", "link", "written")

    def __init__(self, link: Link, source: Tensor, buffer: HostBuffer, line: Line) -> None:
        self.link, self.buffer, self.line = link, buffer, line
        self.written = link.copy_out(source, buffer, line)

    def wait_out(self) -> None:
        """The computation waits for the copy out."""
        self.link.wait_out(self.written)

    def bring_back(self, swapped: Swapped) -> None:
        """Start the copy back into ``swapped.target``."""
        self.link.copy_back(swapped, self.buffer, self.written)

    def wait_back(self, swapped: Swapped) -> None:
        """The stream that is about to use the target waits for the copy back."""
        self.link.wait_back(swapped)

    def let_go(self, swapped: Swapped) -> None:
        """The target is about to be let go."""
        self.link.let_go(swapped)

    def close(self) -> None:
        """Give the buffer back."""
        self.line.stash.append(self.buffer)


class DiskPlace:
    """A piece of the disk's file; on its way there and back the bytes pass through a buffer of host memory."""

    __slots__ = ("buffer", "disk", "extent", "line", "link", "reading", "writing", "written")

    def __init__(
        self, link: Link, source: Tensor, buffer: HostBuffer, line: Line, disk: DiskFile, extent: Extent
    ) -> None:
        self.link, self.line, self.disk, self.extent = link, line, disk, extent
        self.buffer: HostBuffer | None = buffer
        self.written = link.copy_out(source, buffer, line)
        self.writing = disk.submit(self._write, buffer)
        self.reading: Task | None = None

    def _write(self, buffer: HostBuffer) -> None:
        """On a thread of the disk: write, and give the buffer back."""
        if self.written is not None:
            self.written.end.synchronize()
        try:
            self.disk.write(buffer, self.extent)
        except OSError as error:  # the bytes stay in the buffer
            self.line.note(f"the disk failed, host memory is used: {error.strerror or error}")
            return
        self.buffer = None
        self.line.stash.append(buffer)

    def wait_out(self) -> None:
        """The computation waits for the copy out; the write to disk goes on by itself."""
        self.link.wait_out(self.written)

    def bring_back(self, swapped: Swapped) -> None:
        """Start reading into ``swapped.target``."""
        transfer = self.link.transfer
        ready = None
        if transfer is not None:
            computation = transfer.computation()
            ready = computation, computation.record_event()
        self.reading = self.disk.submit(self._read, swapped, ready)

    def _read(self, swapped: Swapped, ready: tuple[torch.Stream, torch.Event] | None) -> None:
        """On a thread of the disk."""
        self.writing.wait()
        if self.buffer is not None:
            self.link.copy_back(swapped, self.buffer, self.written, ready)
            return
        size, stash = self.extent.size, self.line.stash
        buffer = self.link.pool.get(stash, swapped.shape, swapped.dtype, size)
        pooled = buffer is not None
        if buffer is None:  # the limit is reached; two threads read, so at most two of these are about
            buffer = HostBuffer(torch.empty(size, dtype=torch.uint8, device="cpu"))
            buffer.shape_as(swapped.shape, swapped.dtype)
        if buffer.available is not None:
            buffer.available.synchronize()
        self.disk.read(buffer, self.extent)
        self.link.copy_back(swapped, buffer, None, ready)
        if pooled:
            stash.append(buffer)

    def wait_back(self, swapped: Swapped) -> None:
        """Wait for the disk, then as for a buffer."""
        self._finish()
        self.link.wait_back(swapped)

    def let_go(self, swapped: Swapped) -> None:
        """Wait for the disk, then as for a buffer."""
        self._finish()
        self.link.let_go(swapped)

    def _finish(self) -> None:
        reading = self.reading
        if reading is not None:
            begin = perf_counter()
            try:
                reading.wait()
            finally:
                if reading.over:
                    self.reading = None
            self.line.stall_seconds += perf_counter() - begin

    def close(self) -> None:
        """Give the space back when the disk is done with it."""
        if self.writing.over:
            self._closed()
        else:
            self.disk.submit(self._closed)

    def _closed(self) -> None:
        with suppress(Exception):  # its bytes are not wanted any more
            self.writing.wait()
        if self.buffer is not None:
            self.line.stash.append(self.buffer)
        self.disk.release(self.extent)

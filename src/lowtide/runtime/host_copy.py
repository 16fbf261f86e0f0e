"""Where an offloaded tensor's bytes are: in host memory, or on disk."""

from __future__ import annotations

from contextlib import suppress
from time import perf_counter

import torch
from torch import Tensor

from lowtide.runtime.disk import DiskFile, Extent, Task
from lowtide.runtime.host import HostBuffer
from lowtide.runtime.ledger import Line
from lowtide.runtime.link import Link
from lowtide.runtime.transfer import Copy

__all__ = ["DiskCopy", "HostCopy"]


class HostCopy:
    """A tensor's bytes in a buffer of host memory."""

    __slots__ = ("buffer", "line", "link", "reloading", "written")

    def __init__(self, link: Link, source: Tensor, buffer: HostBuffer, line: Line) -> None:
        self.link, self.line = link, line
        self.buffer: HostBuffer | None = buffer
        self.written = link.offload(source, buffer, line)
        self.reloading: Copy | None = None

    def wait_offload(self) -> None:
        """The compute stream, whose memory is about to be freed, waits for the offload."""
        if self.written is not None:
            self.written.compute.wait_event(self.written.end)

    def reload(self, target: Tensor) -> None:
        """Start the copy into ``target``."""
        assert self.buffer is not None
        self.reloading = self.link.reload(target, self.buffer, self.line, self.written)

    def wait_reload(self, target: Tensor) -> None:
        """The stream that is about to use ``target`` waits for the reload."""
        self.link.wait_reload(self.reloading, target, self.line)

    def forget_reload(self) -> None:
        """The reload's target is about to be freed: the compute stream waits for the copy, if no stream has."""
        copy, self.reloading = self.reloading, None
        if copy is not None and not copy.awaited:
            copy.compute.wait_event(copy.end)

    def close(self) -> None:
        """Give the buffer back."""
        if self.buffer is not None:
            self.line.stash.append(self.buffer)


class DiskCopy(HostCopy):
    """A tensor's bytes in an extent of the disk's file; they pass through a buffer of host memory both times."""

    __slots__ = ("disk", "extent", "reading", "writing")

    def __init__(
        self, link: Link, source: Tensor, buffer: HostBuffer, line: Line, disk: DiskFile, extent: Extent
    ) -> None:
        super().__init__(link, source, buffer, line)
        self.disk, self.extent = disk, extent
        self.writing = disk.submit(self._write, buffer)
        self.reading: Task | None = None

    def _write(self, buffer: HostBuffer) -> None:
        """On a disk thread: write, and give the buffer back."""
        if self.written is not None:
            self.written.end.synchronize()
        try:
            self.disk.write(buffer, self.extent)
        except OSError as error:  # the bytes stay in the buffer
            self.line.note(f"the disk failed, host memory is used: {error.strerror or error}")
            return
        self.buffer = None
        self.line.stash.append(buffer)

    def reload(self, target: Tensor) -> None:
        """Start reading into ``target``."""
        transfer = self.link.transfer
        ready = None
        if transfer is not None:
            compute = transfer.compute()
            ready = compute, compute.record_event()
        self.reading = self.disk.submit(self._read, target, ready)

    def _read(self, target: Tensor, ready: tuple[torch.Stream, torch.Event] | None) -> None:
        """On a disk thread."""
        self.writing.wait()
        if self.buffer is not None:
            self.reloading = self.link.reload(target, self.buffer, self.line, self.written, ready)
            return
        size, stash = self.extent.size, self.line.stash
        buffer = self.link.pool.get(stash, target.shape, target.dtype, size)
        pooled = buffer is not None
        if buffer is None:  # the limit is reached; two threads read, so at most two of these exist
            buffer = HostBuffer(torch.empty(size, dtype=torch.uint8, device="cpu"))
            buffer.shape_as(target.shape, target.dtype)
        if buffer.available is not None:
            buffer.available.synchronize()
        self.disk.read(buffer, self.extent)
        self.reloading = self.link.reload(target, buffer, self.line, None, ready)
        if pooled:
            stash.append(buffer)

    def wait_reload(self, target: Tensor) -> None:
        """Wait for the disk, then as for a buffer."""
        self._finish()
        super().wait_reload(target)

    def forget_reload(self) -> None:
        """Wait for the disk, then as for a buffer."""
        self._finish()
        super().forget_reload()

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
        """Give the extent back when the disk is done with it."""
        if self.writing.over:
            self._closed()
        else:
            self.disk.submit(self._closed)

    def _closed(self) -> None:
        with suppress(Exception):  # its bytes are not needed any more
            self.writing.wait()
        super().close()
        self.disk.release(self.extent)

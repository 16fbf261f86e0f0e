"""The disk tier: one file without a name, written and read beside the training."""

from __future__ import annotations

import os
import tempfile
import weakref
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from lowtide.errors import SwapError
from lowtide.runtime.host import PAGE, HostBuffer

__all__ = ["DiskFile", "Extent"]


class Extent:
    """A piece of the file that holds one tensor."""

    __slots__ = ("checksum", "length", "offset", "size")

    def __init__(self, offset: int, size: int, length: int) -> None:
        self.offset, self.size, self.length = offset, size, length
        self.checksum = 0


class DiskFile:
    """Extents of a file that is unlinked at once: a killed process leaves nothing behind.

    Reads and writes run on threads of their own. Where the file system allows it they bypass the page cache, which
    would only hold the bytes a second time in the memory that was to be saved.
    """

    def __init__(self, directory: str, limit: int) -> None:
        self.limit = limit
        self.end = 0
        self.free: dict[int, list[int]] = {}
        self.workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="lowtide-disk")
        handle, path = tempfile.mkstemp(prefix="lowtide-", dir=directory)  # mode 0600
        try:
            self.buffered = handle
            self.direct = _open_direct(path)
        finally:
            os.unlink(path)
        # With the last tensor that is in the file the space is given back; what is under way holds one.
        weakref.finalize(self, _close, self.workers, {self.buffered, self.direct})

    def reserve(self, length: int) -> Extent | None:
        """Room for ``length`` bytes; None if the limit is reached."""
        size = -(-length // PAGE) * PAGE
        waiting = self.free.get(size)
        if waiting:
            return Extent(waiting.pop(), size, length)
        if self.end + size > self.limit:
            return None
        self.end += size
        return Extent(self.end - size, size, length)

    def release(self, extent: Extent) -> None:
        """The extent's bytes are not needed any more."""
        self.free.setdefault(extent.size, []).append(extent.offset)

    def submit(self, task: Callable[..., None], *args: Any) -> Future[None]:
        """Run ``task`` on one of the file's threads."""
        return self.workers.submit(task, *args)

    def write(self, buffer: HostBuffer, extent: Extent) -> None:
        """Write a buffer out; OSError where the disk is full or broken."""
        memory = memoryview(buffer.bytes.numpy().data)[: extent.size]
        extent.checksum = zlib.crc32(memory[: extent.length])
        done = 0
        while done < extent.size:
            count = os.pwrite(self._handle(buffer), memory[done:], extent.offset + done)
            if count <= 0:
                raise OSError("the disk took no bytes")
            done += count

    def read(self, buffer: HostBuffer, extent: Extent) -> None:
        """Read a buffer back, and prove that it is what was written."""
        memory = memoryview(buffer.bytes.numpy().data)[: extent.size]
        done = 0
        while done < extent.length:
            try:
                count = os.preadv(self._handle(buffer), [memory[done:]], extent.offset + done)
            except OSError as error:
                raise SwapError(f"a swapped tensor could not be read back from disk: {error}") from error
            if count <= 0:
                raise SwapError(f"a swapped tensor of {extent.length} bytes came back from disk as {done} bytes")
            done += count
        if zlib.crc32(memory[: extent.length]) != extent.checksum:
            raise SwapError("a swapped tensor came back from disk with other bytes than were written")

    def _handle(self, buffer: HostBuffer) -> int:
        return self.direct if buffer.bytes.data_ptr() % PAGE == 0 else self.buffered


def _close(workers: ThreadPoolExecutor, handles: set[int]) -> None:
    workers.shutdown(wait=False)
    for handle in handles:
        os.close(handle)


def _open_direct(path: str) -> int:
    """The file opened past the page cache, where its file system can do that."""
    try:
        return os.open(path, os.O_RDWR | getattr(os, "O_DIRECT", 0))
    except OSError:
        return os.open(path, os.O_RDWR)

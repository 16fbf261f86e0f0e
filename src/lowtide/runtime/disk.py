"""The disk tier: one file without a name, written and read by threads of its own.

[Note: locks and interrupts]
Ctrl-C is raised between any two steps of Python code, also inside Python's own ``Condition``, on which its executors,
futures and events are built: its lock then stays taken for ever, and the thread that wants it next waits for ever. So
threads are handed their tasks through a queue that is written in C, and waiting is looking at a plain attribute.
"""

from __future__ import annotations

import os
import tempfile
import weakref
import zlib
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from lowtide.errors import SwapError
from lowtide.runtime.host import PAGE, HostBuffer

__all__ = ["DiskFile", "Extent", "Task"]

THREADS = 2


class Extent:
    """A piece of the file that holds one tensor."""

    __slots__ = ("checksum", "length", "offset", "size")

    def __init__(self, offset: int, size: int, length: int) -> None:
        self.offset, self.size, self.length = offset, size, length
        self.checksum = 0


class Task:
    """Something that one of the file's threads does. See [Note: locks and interrupts]."""

    __slots__ = ("args", "ended", "error", "function", "over")

    def __init__(self, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.function, self.args = function, args
        self.over = False
        self.error: Exception | None = None
        self.ended: SimpleQueue[None] = SimpleQueue()

    def run(self) -> None:
        """Do it."""
        try:
            self.function(*self.args)
        except Exception as error:
            self.error = error
        self.over = True
        self.ended.put(None)
        self.args = ()  # last: what ends with it may wait for this

    def wait(self) -> None:
        """Wait until it is over; raises what it raised."""
        while not self.over:
            with suppress(Empty):
                self.ended.get(timeout=1.0)  # a waiter that was interrupted may have taken it
        if self.error is not None:
            raise self.error


def _work(tasks: SimpleQueue[Task | None]) -> None:
    while (task := tasks.get()) is not None:
        task.run()
        del task  # it holds the file, whose end ends this


class DiskFile:
    """Extents of a file that is unlinked at once: a killed process leaves nothing behind.

    Reads and writes run on threads of their own. Where the file system allows it they bypass the page cache, which
    would only hold the bytes a second time in the memory that was to be saved.
    """

    def __init__(self, directory: str, limit: int) -> None:
        self.limit = limit
        self.end = 0
        self.free: dict[int, list[int]] = {}
        self.tasks: SimpleQueue[Task | None] = SimpleQueue()
        handle, path = tempfile.mkstemp(prefix="lowtide-", dir=directory)  # mode 0600
        try:
            self.buffered = handle
            self.direct = _open_direct(path)
        finally:
            os.unlink(path)
        # With the last tensor that is in the file the space is given back; a task in progress holds one.
        weakref.finalize(self, _close, self.tasks, {self.buffered, self.direct})
        for number in range(THREADS):
            Thread(target=_work, args=(self.tasks,), name=f"lowtide-disk-{number}", daemon=True).start()

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

    def submit(self, function: Callable[..., None], *args: Any) -> Task:
        """Call ``function`` on one of the file's threads."""
        task = Task(function, args)
        self.tasks.put(task)
        return task

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
                raise SwapError(f"a swapped tensor of {extent.length} bytes was read from disk as {done} bytes")
            done += count
        if zlib.crc32(memory[: extent.length]) != extent.checksum:
            raise SwapError("a swapped tensor was read from disk with other bytes than were written")

    def _handle(self, buffer: HostBuffer) -> int:
        return self.direct if buffer.bytes.data_ptr() % PAGE == 0 else self.buffered


def _close(tasks: SimpleQueue[Task | None], handles: set[int]) -> None:
    for _ in range(THREADS):
        tasks.put(None)
    for handle in handles:
        os.close(handle)


def _open_direct(path: str) -> int:
    """The file opened past the page cache, where its file system can do that."""
    try:
        return os.open(path, os.O_RDWR | getattr(os, "O_DIRECT", 0))
    except OSError:
        return os.open(path, os.O_RDWR)

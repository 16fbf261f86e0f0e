"""One storage that is offloaded between forward and backward, and the ways that saved tensors see it.

[Note: lifetime]
A swapped storage is one object, ``Swapped``, held by whatever autograd saved in its place. When autograd frees the last
of those, after the operators that used it or because the graph was dropped, the object is finalized and gives its host
memory back. So nothing counts uses: a graph that is run twice unpacks twice, one that is never run never unpacks, and
an exception leaves nothing behind. What was reloaded is freed at the end of the graph task, should the graph live on.

An operator such as softmax saves its own output. Its node holds what was saved, and the output holds the node: if what
was saved holds the output, the graph is never freed unless it is run. So everything that is held for a node is
detached.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress

import torch
from torch import Tensor

from lowtide._torch_private.backward import at_end_of_backward, current_backward
from lowtide._torch_private.versions import own_version
from lowtide.errors import SwapError
from lowtide.operators.saved import Saved
from lowtide.out_of_memory import is_out_of_memory
from lowtide.runtime.host_copy import HostCopy
from lowtide.runtime.ledger import Line
from lowtide.runtime.view import View

__all__ = ["Reloads", "Swapped", "SwappedSlice", "SwappedView"]


class Reloads:
    """What of one model has been reloaded: its lock, its bytes, and what to free when backward ends."""

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, 0
        """Bytes that were prefetched and not used yet, and how many they may be."""
        self.lock = threading.RLock()
        self.done: list[weakref.ReferenceType[Swapped]] = []
        self.backward = -1

    def add(self, swapped: Swapped) -> None:
        """Free ``swapped`` again at the end of this backward, if the graph lives on."""
        running = current_backward()
        if running == -1:
            return
        if running != self.backward:
            self.backward = running
            at_end_of_backward(self._end_of_backward)
        self.done.append(weakref.ref(swapped))

    def _end_of_backward(self) -> None:
        with self.lock:
            done, self.done = self.done, []
            for reference in done:
                swapped = reference()
                if swapped is not None:
                    swapped.forget()


class Swapped:
    """A storage that is offloaded between forward and backward. See [Note: lifetime]."""

    __slots__ = (
        "__weakref__", "ahead", "copy", "device", "dtype", "handed", "line", "mutated", "reloads", "shape",
        "size", "source", "target", "version",
    )  # fmt: skip

    def __init__(self, reloads: Reloads, source: Tensor, size: int, line: Line, copy: HostCopy) -> None:
        self.reloads, self.size, self.line, self.copy = reloads, size, line, copy
        self.source: Tensor | None = source
        """The tensor, until its device memory is freed."""
        self.shape, self.dtype, self.device = source.shape, source.dtype, source.device
        self.version = own_version(source)
        self.mutated = self.ahead = self.handed = False
        self.target: Tensor | None = None
        """Where it is reloaded to."""

    def release(self) -> None:
        """Free the device memory. The compute stream waits for the offload first."""
        source = self.source
        if source is None:
            return
        if own_version(source) != self.version:
            self.mutated = True  # the copy may have seen either value; autograd would refuse it, and so do we
        self.copy.wait_offload()
        self.source = None
        self.line.freed_bytes += self.size

    def prefetch(self) -> None:
        """Start the reload, unless the tensor is on the device or there is no room for it now."""
        reloads = self.reloads
        with reloads.lock:
            if self.source is not None or self.target is not None:
                return
            if reloads.bytes + self.size > reloads.limit:
                self.line.note("too much is being reloaded: reloaded when needed")
                return
            try:
                self._reload()
            except RuntimeError:  # out of memory, or the copy failed: it is tried again when it is needed
                self.line.note("the prefetch could not start")
                return
            self.ahead = True
            reloads.bytes += self.size

    def tensor(self) -> Tensor:
        """The tensor on the device. SwapError if it was modified in place, or if its reload failed twice."""
        with self.reloads.lock:
            source = self.source  # another thread's forward may free it meanwhile
            if self.mutated or (source is not None and own_version(source) != self.version):
                raise SwapError(
                    f"what {self.line.whose} produced was changed in place after it was"
                    " saved for backward; autograd would refuse it too: keep the tensor, or do not write into it"
                )
            if source is not None:
                if not self.handed:
                    self.handed = True
                    self.line.handed_back_bytes += self.size
                return source
            try:
                return self._on_device()
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
            self.line.note("a reload failed and was tried again")
            try:
                return self._on_device()
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                raise SwapError(
                    f"what {self.line.whose} produced could not be reloaded to {self.device}, twice: {error}"
                ) from error

    def forget(self) -> None:
        """The graph task is over and the graph lives on: the host has the bytes, the device need not."""
        with self.reloads.lock:
            if self.target is not None:
                self._used()
                with suppress(RuntimeError, SwapError):  # a reload that failed was not asked for
                    self.copy.forget_reload()
                self.target = None

    def _on_device(self) -> Tensor:
        if self.target is None:
            self._reload()
        self._used()
        target = self.target
        assert target is not None
        try:
            self.copy.wait_reload(target)
        except BaseException:
            with suppress(Exception):  # a copy may have been issued: its target stays until it has ended
                self.copy.forget_reload()
            self.copy.link.settle()
            self.target = None
            raise
        return target

    def _reload(self) -> None:
        target = self.target = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        try:
            self.copy.reload(target)
        except BaseException:
            self.copy.link.settle()
            self.target = None  # what was never filled must not be taken for the tensor
            raise
        self.reloads.add(self)

    def _used(self) -> None:
        if self.ahead:
            self.ahead = False
            self.reloads.bytes -= self.size

    def __del__(self) -> None:
        with suppress(Exception):  # at the interpreter's end there is nothing left to wait for
            if self.source is not None:
                self.copy.wait_offload()
            if self.target is not None:
                self._used()
                self.copy.forget_reload()
        with suppress(Exception):
            self.copy.close()


class SwappedView:
    """A view of a swapped storage."""

    __slots__ = ("swapped", "view")

    def __init__(self, swapped: Saved, tensor: Tensor) -> None:
        self.swapped, self.view = swapped, View.by(tensor)

    def tensor(self) -> Tensor:
        """The view of what is reloaded."""
        return self.view.of(self.swapped.tensor())


class SwappedSlice:
    """A view of less than half of its storage: it was offloaded alone, and gets its layout back."""

    __slots__ = ("offset", "shape", "stride", "swapped")

    def __init__(self, swapped: Saved, tensor: Tensor) -> None:
        self.swapped = swapped
        self.shape, self.stride = tensor.shape, tensor.stride()
        self.offset = tensor.storage_offset() % 64  # kernels may choose by alignment

    def tensor(self) -> Tensor:
        """What is reloaded, in the strides that it had."""
        dense = self.swapped.tensor()
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        span = span if dense.numel() else 0  # an expert without tokens
        memory = torch.empty(self.offset + span, dtype=dense.dtype, device=dense.device)
        return memory.as_strided(self.shape, self.stride, self.offset).copy_(dense)

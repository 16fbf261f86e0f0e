"""Take tensors out of the device's memory in forward, and bring them back in backward.

[Note: lifetime]
A swapped tensor is one object, ``Swapped``, held by whatever autograd saved in its place. When autograd lets go of the
last of those, after the operators that used it or because the graph was dropped, the object ends and gives its host
memory back. So nothing counts uses: a graph that is run twice asks twice, one that is never run never asks, and an
exception leaves nothing behind. What came back is dropped at the end of the graph task, should the graph live on.

An operator such as softmax saves its own output. Its node holds what was saved, and the output holds the node: if what
was saved holds the output, the graph never ends unless it is run. So everything that is held for a node is detached.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeAlias

import torch
from torch import Tensor

from lowtide._torch_private.backward import at_end_of_backward, current_backward
from lowtide._torch_private.nodes import without_graph
from lowtide._torch_private.storages import StorageWeakRef, storage_key, weak_storage
from lowtide._torch_private.subclasses import PLAIN, Subclass, taken_apart
from lowtide.errors import SwapError
from lowtide.out_of_memory import is_out_of_memory
from lowtide.policy import Swap
from lowtide.runtime.disk import DiskFile
from lowtide.runtime.host import HostBuffer, HostPool
from lowtide.runtime.ledger import Ledger, Line
from lowtide.runtime.limits import Limits
from lowtide.runtime.module_state import BufferCopies
from lowtide.runtime.outside import Outside
from lowtide.runtime.places import DiskPlace, HostPlace, Link
from lowtide.runtime.saved import Saved, unpack
from lowtide.runtime.schedule import Schedule
from lowtide.runtime.transfer import Copy
from lowtide.runtime.view import View, as_stored

__all__ = ["Departures", "SwapManager", "Swapped", "copy_on_host"]

Place: TypeAlias = HostPlace | DiskPlace


class Swapped:
    """A storage that is on the host between forward and backward."""

    __slots__ = (
        "__weakref__", "ahead", "back", "device", "dtype", "handed", "line", "manager", "mutated", "place", "reference",
        "shape", "size", "source", "target", "version",
    )  # fmt: skip

    def __init__(self, manager: SwapManager, source: Tensor, size: int, line: Line, place: Place) -> None:
        self.manager, self.size, self.line, self.place = manager, size, line, place
        self.source: Tensor | None = source
        self.shape, self.dtype, self.device = source.shape, source.dtype, source.device
        self.version = source._version
        self.mutated = self.ahead = self.handed = False
        self.target: Tensor | None = None
        self.back: Copy | None = None
        self.reference = weakref.ref(self)

    def release(self) -> None:
        """Let the device memory go. The computation waits for the copy out first."""
        source = self.source
        if source is None:
            return
        if source._version != self.version:
            self.mutated = True  # the copy may have seen either value; autograd would refuse it, and so do we
        self.place.wait_out()
        self.source = None
        self.line.freed_bytes += self.size

    def prefetch(self) -> None:
        """Start the copy back, unless the tensor is here or there is no room for it now."""
        with self.manager.lock:
            if self.source is not None or self.target is not None:
                return
            if self.manager.returning_bytes + self.size > self.manager.limits.in_flight_bytes:
                self.line.note("too much on its way back: brought back when needed")
                return
            try:
                self._bring_back()
            except RuntimeError:  # no memory yet, or the copy failed: it is tried again when it is needed
                self.line.note("the copy back could not start ahead of time")
                return
            self.ahead = True
            self.manager.returning_bytes += self.size

    def tensor(self) -> Tensor:
        """The tensor on the device."""
        with self.manager.lock:
            source = self.source  # another thread's forward may let it go meanwhile
            if self.mutated or (source is not None and source._version != self.version):
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
                return self._here()
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
                return self._here_at_last()

    def forget(self) -> None:
        """The graph task is over and the graph lives on: the host has the bytes, the device need not."""
        with self.manager.lock:
            if self.target is not None:
                self._arrive()
                with suppress(RuntimeError, SwapError):  # what failed to come back was not asked for
                    self.place.let_go(self)
                self.target = None

    def _here(self) -> Tensor:
        if self.target is None:
            self._bring_back()
        self._arrive()
        try:
            self.place.wait_back(self)
        except BaseException:
            with suppress(Exception):  # a copy may be under way: its target stays until it has ended
                self.place.let_go(self)
            self.manager.link(self.device).settle()
            self.target = None
            raise
        assert self.target is not None
        return self.target

    def _here_at_last(self) -> Tensor:
        self.line.note("a copy back failed and was repeated")
        try:
            return self._here()
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise SwapError(
                f"what {self.line.whose} produced could not be copied back to {self.device}, twice: {error}"
            ) from error

    def _bring_back(self) -> None:
        self.target = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        try:
            self.place.bring_back(self)
        except BaseException:
            self.manager.link(self.device).settle()
            self.target = None  # nobody may take what was never filled for the tensor
            raise
        self.manager.came_back(self)

    def _arrive(self) -> None:
        if self.ahead:
            self.ahead = False
            self.manager.returning_bytes -= self.size

    def __del__(self) -> None:
        with suppress(Exception):  # at the interpreter's end there is nothing left to wait for
            if self.source is not None:
                self.place.wait_out()
            if self.target is not None:
                self._arrive()
                self.place.let_go(self)
        with suppress(Exception):
            self.place.close()


class _Copied:
    """A tensor of the host's own that was swapped to the host: a plain copy, which is done when it is made."""

    __slots__ = ("buffer", "line")

    def __init__(self, buffer: HostBuffer, line: Line) -> None:
        self.buffer, self.line = buffer, line

    def tensor(self) -> Tensor:
        return self.buffer.memory.clone()

    def __del__(self) -> None:
        self.line.stash.append(self.buffer)


def copy_on_host(tensor: Tensor, line: Line) -> _Copied | None:
    """Copy a tensor of the host's own that is all of its storage, if the operator's last buffer fits it just so.

    This path has to be short.
    """
    if not tensor.is_cpu:
        return None
    try:
        buffer = line.stash.pop()
    except IndexError:
        return None
    if (
        buffer.shape != tensor.shape
        or buffer.dtype is not tensor.dtype
        or not tensor.is_contiguous()
        or type(tensor) is not Tensor
    ):
        line.stash.append(buffer)
        return None
    memory = buffer.memory
    memory.copy_(tensor)
    size = memory.nbytes
    line.swaps += 1
    line.moved_bytes += size
    line.freed_bytes += size
    return _Copied(buffer, line)


class SwappedView:
    """Another view of a swapped storage."""

    __slots__ = ("swapped", "view")

    def __init__(self, swapped: Swapped | _Copied, tensor: Tensor) -> None:
        self.swapped, self.view = swapped, View.by(tensor)

    def tensor(self) -> Tensor:
        return self.view.of(self.swapped.tensor())


class _Gathered:
    """A view of less than half of its storage: it left alone, and gets its layout back."""

    __slots__ = ("offset", "shape", "stride", "swapped")

    def __init__(self, swapped: Swapped | _Copied, tensor: Tensor) -> None:
        self.swapped = swapped
        self.shape, self.stride = tensor.shape, tensor.stride()
        self.offset = tensor.storage_offset() % 64  # kernels may choose by alignment

    def tensor(self) -> Tensor:
        dense = self.swapped.tensor()
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        span = span if dense.numel() else 0  # an expert without tokens
        memory = torch.empty(self.offset + span, dtype=dense.dtype, device=dense.device)
        return memory.as_strided(self.shape, self.stride, self.offset).copy_(dense)


class _Parts:
    """A tensor subclass, such as a DTensor, whose parts left."""

    __slots__ = ("parts", "whole")

    def __init__(self, whole: Subclass, parts: Mapping[str, SavedPart]) -> None:
        self.whole, self.parts = whole, parts

    def tensor(self) -> Tensor:
        return self.whole.rebuilt({name: unpack(part) for name, part in self.parts.items()})


SavedPart: TypeAlias = Tensor | Swapped | _Copied | SwappedView | _Gathered | _Parts


class SwapManager:
    """All that is swapped of one model: the host's memory, the disk, the link, and their limits."""

    def __init__(self, limits: Limits, ledger: Ledger) -> None:
        self.limits, self.ledger = limits, ledger
        self.schedule = Schedule(limits.in_flight_bytes)
        self.lock = threading.RLock()
        self.returned: list[weakref.ReferenceType[Swapped]] = []
        self.returning_bytes = 0
        self.backward = -1
        self.host_pool = HostPool(limits.host_bytes, pinned=False)
        self.pinned_pool = HostPool(limits.host_bytes, pinned=True)
        self.links: dict[torch.device, Link] = {}
        self._disk: DiskFile | None = None
        self.buffers, self.outside = BufferCopies(), Outside()
        """What is known of the modules whose calls are captured."""
        self.keep: Callable[[Tensor], Saved] | None = None
        """Given what stays, so that it can still leave when memory runs out; None: it stays."""

    @property
    def disk(self) -> DiskFile:
        """The file of the disk tier, made when it is first needed."""
        if self._disk is None:
            self._disk = DiskFile(self.limits.disk_directory, self.limits.disk_bytes)
        return self._disk

    def link(self, device: torch.device) -> Link:
        """The way between a device and the host."""
        found = self.links.get(device)
        if found is None:
            pool = self.host_pool if device.type == "cpu" else self.pinned_pool
            found = self.links[device] = Link(device, pool, self.ledger)
        return found

    def take(self, source: Tensor, size: int, swap: Swap, line: Line) -> Swapped | None:
        """Start copying ``source``, which holds a storage of ``size`` bytes; None if it has to stay."""
        link = self.link(source.device)
        buffer = link.pool.get(line.stash, source.shape, source.dtype, source.nbytes)
        if buffer is None:
            line.keep(size, "the limit of host memory is reached")
            return None
        extent = None
        if swap.tier == "disk":
            try:
                extent = self.disk.reserve(source.nbytes)
                if extent is None:
                    line.note("the limit of the disk is reached: host memory is used")
            except OSError as error:  # no such directory, or no file can be made in it
                line.note(f"the disk failed, host memory is used: {error.strerror or error}")
        try:
            if extent is None:
                place: Place = HostPlace(link, source, buffer, line)
            else:
                place = DiskPlace(link, source, buffer, line, self.disk, extent)
            swapped = Swapped(self, source, size, line, place)
        except RuntimeError as error:
            line.keep(size, f"the copy out failed: {str(error).splitlines()[0][:120]}")
            line.stash.append(buffer)
            if extent is not None:
                self.disk.release(extent)
            return None
        except BaseException:
            link.settle()
            raise
        line.swaps += 1
        line.moved_bytes += size
        line.spared_bytes += size - source.nbytes
        return swapped

    def copy(self, source: Tensor, size: int, line: Line) -> _Copied | None:
        """Copy a tensor of the host's own; None if there is no room."""
        pool = self.host_pool
        buffer = pool.get(line.stash, source.shape, source.dtype, source.nbytes)
        if buffer is None:
            line.keep(size, "the limit of host memory is reached")
            return None
        buffer.memory.copy_(source)
        line.swaps += 1
        line.moved_bytes += size
        line.freed_bytes += size
        line.spared_bytes += size - source.nbytes
        return _Copied(buffer, line)

    def came_back(self, swapped: Swapped) -> None:
        """Note what came back, so that it can go at the end of this backward if the graph lives on."""
        running = current_backward()
        if running == -1:
            return
        if running != self.backward:
            self.backward = running
            at_end_of_backward(self._end_of_backward)
        self.returned.append(swapped.reference)

    def _end_of_backward(self) -> None:
        with self.lock:
            returned, self.returned = self.returned, []
            for reference in returned:
                swapped = reference()
                if swapped is not None:
                    swapped.forget()

    def close(self) -> None:
        """Give everything back that nothing refers to any more."""
        for line in self.ledger.lines.values():
            line.stash.clear()
        self.links.clear()
        self._disk = None


class Departures:
    """What leaves while one layer runs: each storage once."""

    __slots__ = ("known", "latest", "manager")

    def __init__(self, manager: SwapManager) -> None:
        self.manager = manager
        self.known: dict[int, tuple[StorageWeakRef, int, Swapped | _Copied, torch.Size, torch.dtype]] = {}
        self.latest: list[Swapped] = []
        """What of the last tensor that was asked for will have to come back."""

    def out(self, tensor: Tensor, swap: Swap, line: Line, due: int, *, alone: bool = False) -> SavedPart:
        """Start taking ``tensor`` out of the device's memory; itself, if it has to stay.

        Its memory is let go when operator ``due`` is reached. ``alone`` says that nothing else of its storage follows.
        """
        self.latest = []
        # What is held here must not hold the graph, which holds this.
        return self._out(without_graph(tensor), swap, line, due, alone)

    def find(self, tensor: Tensor) -> Swapped | _Copied | SwappedView | _Parts | None:
        """How ``tensor`` can be had back, if its storage has left."""
        if type(tensor) not in PLAIN:
            whole = taken_apart(tensor)
            parts = {name: self.find(part) for name, part in whole.tensors.items()} if whole is not None else {}
            away = {name: part for name, part in parts.items() if part is not None}
            return _Parts(whole._replace(tensors={}), away) if whole is not None and len(away) == len(parts) else None
        known = self.known.get(storage_key(tensor))
        if known is None or known[0].expired() or known[1] != tensor._version:  # written to since: another value
            return None
        swapped, shape, dtype = known[2:]
        if isinstance(swapped, Swapped):
            self.latest.append(swapped)
        same = shape == tensor.shape and dtype is tensor.dtype and tensor.is_contiguous()
        same = same and not (tensor.is_conj() or tensor.is_neg())
        return swapped if same else SwappedView(swapped, tensor)

    def _out(self, tensor: Tensor, swap: Swap, line: Line, due: int, alone: bool) -> SavedPart:
        if type(tensor) not in PLAIN:
            whole = taken_apart(tensor)
            if whole is None or tensor.is_nested:  # the rows of a nested one are known by the tensor of their offsets
                line.keep(0, f"a {type(tensor).__name__} cannot be taken apart")
                return tensor
            parts = {name: self._out(part, swap, line, due, alone) for name, part in whole.tensors.items()}
            if all(isinstance(part, Tensor) for part in parts.values()):
                return tensor
            return _Parts(whole._replace(tensors={}), parts)
        if tensor.layout is not torch.strided:
            line.keep(0, f"a tensor of layout {tensor.layout} stays")
            return tensor
        if self.known:
            found = self.find(tensor)
            if found is not None:
                return found
        size = tensor.untyped_storage().nbytes()
        manager = self.manager
        if size < manager.limits.minimum_bytes:
            line.keep(size, "smaller than the minimum")
            return tensor
        source, entire = _departing(as_stored(tensor), size)
        if not entire and (tensor.is_conj() or tensor.is_neg()):
            line.keep(size, "a part of a storage, seen as conjugates or with the other sign")
            return tensor
        swapped: Swapped | _Copied | None
        if tensor.is_cpu and swap.tier == "host":
            swapped = manager.copy(source, size, line)
        else:
            swapped = manager.take(source, size, swap, line)
            if swapped is not None:
                self.latest.append(swapped)
                manager.schedule.leave(swapped.reference, size, due)
        if swapped is None:
            return tensor
        if not entire:
            return _Gathered(swapped, tensor)
        if not alone:
            version = tensor._version
            self.known[storage_key(tensor)] = (weak_storage(tensor), version, swapped, source.shape, source.dtype)
        return swapped if source is tensor else SwappedView(swapped, tensor)


def _departing(tensor: Tensor, size: int) -> tuple[Tensor, bool]:
    """What of ``tensor`` is copied: its whole storage, or, if it is less than half of that, only itself."""
    item = tensor.dtype.itemsize
    used = tensor.numel() * item
    if used == size and tensor.is_contiguous():
        return tensor, True
    if size % item == 0 and (2 * used >= size or 0 in tensor.stride()):
        return tensor.as_strided((size // item,), (1,), 0), True
    return tensor.contiguous(), False

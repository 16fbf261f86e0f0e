"""Take tensors out of the device's memory in forward, and bring them back in backward.

[Note: lifetime]
A swapped tensor is one object, ``Swapped``, held by whatever autograd saved in its place. When autograd lets go of the
last of those, after the operators that used it or because the graph was dropped, the object ends and gives its host
memory back. So nothing counts uses: a graph that is run twice asks twice, one that is never run never asks, and an
exception leaves nothing behind. What came back is dropped at the end of the graph task, should the graph live on.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from lowtide._torch_private import (
    StorageWeakRef,
    at_end_of_backward,
    current_backward,
    inner_tensors,
    rebuilt_subclass,
    storage_key,
    weak_storage,
    without_graph,
)
from lowtide.errors import SwapError
from lowtide.policy import Swap
from lowtide.runtime.disk import DiskFile
from lowtide.runtime.host import HostPool
from lowtide.runtime.ledger import Ledger, Line
from lowtide.runtime.limits import Limits
from lowtide.runtime.places import DiskPlace, HostPlace, Link
from lowtide.runtime.schedule import Schedule
from lowtide.runtime.transfer import Copy

__all__ = ["Departures", "SwapManager", "Swapped"]

Place: TypeAlias = HostPlace | DiskPlace


class Swapped:
    """A storage that is on the host between forward and backward."""

    __slots__ = (
        "__weakref__", "ahead", "back", "device", "dtype", "line", "manager", "mutated", "place", "reference", "shape",
        "size", "source", "target", "version",
    )  # fmt: skip

    def __init__(self, manager: SwapManager, source: Tensor, size: int, line: Line, place: Place) -> None:
        self.manager, self.size, self.line, self.place = manager, size, line, place
        self.source: Tensor | None = source
        self.shape, self.dtype, self.device = source.shape, source.dtype, source.device
        self.version = source._version
        self.mutated = self.ahead = False
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
            if self.mutated or (self.source is not None and self.source._version != self.version):
                raise SwapError(
                    f"what {self.line.operator} of layer {self.line.layer} produced was changed in place after it was"
                    " saved for backward; autograd would refuse it too: keep the tensor, or do not write into it"
                )
            if self.source is not None:
                self.line.handed_back_bytes += self.size
                return self.source
            if self.target is None:
                try:
                    self._bring_back()
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError:
                    self._bring_back_again()
            self._wait_back()
            assert self.target is not None
            return self.target

    def forget(self) -> None:
        """The graph task is over and the graph lives on: the host has the bytes, the device need not."""
        with self.manager.lock:
            if self.target is not None:
                self._wait_back()
                self.target = None

    def _bring_back(self) -> None:
        self.target = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        try:
            self.place.bring_back(self)
        except BaseException:
            self.target = None  # nobody may take what was never filled for the tensor
            raise
        self.manager.came_back(self)

    def _bring_back_again(self) -> None:
        self.line.note("a copy back failed and was repeated")
        try:
            self._bring_back()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise SwapError(
                f"what {self.line.operator} of layer {self.line.layer} produced could not be copied back to"
                f" {self.device}, twice: {error}"
            ) from error

    def _wait_back(self) -> None:
        if self.ahead:
            self.ahead = False
            self.manager.returning_bytes -= self.size
        try:
            self.place.wait_back(self)
        except BaseException:
            self.target = None
            raise

    def __del__(self) -> None:
        try:
            if self.source is not None:
                self.place.wait_out()
            if self.target is not None:
                self._wait_back()
            self.place.close()
        except Exception:  # at the interpreter's end there is nothing left to wait for
            return


class SwappedView:
    """Another view of a swapped storage."""

    __slots__ = ("dtype", "offset", "shape", "stride", "swapped")

    def __init__(self, swapped: Swapped, tensor: Tensor) -> None:
        self.swapped, self.dtype = swapped, tensor.dtype
        self.shape, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()

    def tensor(self) -> Tensor:
        whole = self.swapped.tensor()
        if whole.dtype == self.dtype:
            return whole.as_strided(self.shape, self.stride, self.offset)
        empty = torch.empty(0, dtype=self.dtype, device=whole.device)
        return empty.set_(whole.untyped_storage(), self.offset, self.shape, self.stride)


class _Gathered:
    """A view of less than half of its storage: it left alone, and gets its layout back."""

    __slots__ = ("offset", "shape", "stride", "swapped")

    def __init__(self, swapped: Swapped, tensor: Tensor) -> None:
        self.swapped = swapped
        self.shape, self.stride = tensor.shape, tensor.stride()
        self.offset = tensor.storage_offset() % 64  # kernels may choose by alignment

    def tensor(self) -> Tensor:
        dense = self.swapped.tensor()
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        memory = torch.empty(self.offset + span, dtype=dense.dtype, device=dense.device)
        return memory.as_strided(self.shape, self.stride, self.offset).copy_(dense)


class _Parts:
    """A tensor subclass, such as a DTensor, whose parts left."""

    __slots__ = ("context", "kind", "names", "parts", "shape", "stride")

    def __init__(self, tensor: Tensor, names: list[str], context: object, parts: Sequence[SavedPart]) -> None:
        self.kind, self.names, self.context, self.parts = type(tensor), names, context, parts
        self.shape, self.stride = tensor.shape, tensor.stride()

    def tensor(self) -> Tensor:
        parts = [part if isinstance(part, Tensor) else part.tensor() for part in self.parts]
        return rebuilt_subclass(
            self.kind, dict(zip(self.names, parts, strict=True)), self.context, self.shape, self.stride
        )


SavedPart: TypeAlias = Tensor | Swapped | SwappedView | _Gathered | _Parts


class SwapManager:
    """All that is swapped of one model: the host's memory, the disk, the link, and their limits."""

    def __init__(self, limits: Limits, ledger: Ledger) -> None:
        self.limits, self.ledger = limits, ledger
        self.schedule = Schedule(limits.in_flight_bytes)
        self.lock = threading.RLock()
        self.returned: list[weakref.ReferenceType[Swapped]] = []
        self.returning_bytes = 0
        self.backward = -1
        self.pools: dict[bool, HostPool] = {}
        self.links: dict[torch.device, Link] = {}
        self._disk: DiskFile | None = None

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
            pinned = device.type != "cpu"
            if pinned not in self.pools:
                self.pools[pinned] = HostPool(self.limits.host_bytes, pinned=pinned)
            found = self.links[device] = Link(device, self.pools[pinned], self.ledger)
        return found

    def take(self, source: Tensor, size: int, swap: Swap, line: Line) -> Swapped | None:
        """Start copying ``source``, which holds a storage of ``size`` bytes; None if it has to stay."""
        link = self.link(source.device)
        buffer = link.pool.get(source.nbytes)
        if buffer is None:
            line.keep(size, "the limit of host memory is reached")
            return None
        extent = None
        if swap.tier == "disk":
            extent = self.disk.reserve(source.nbytes)
            if extent is None:
                line.note("the limit of the disk is reached: host memory is used")
        try:
            if extent is None:
                place: Place = HostPlace(link, source, buffer, line)
            else:
                place = DiskPlace(link, source, buffer, line, self.disk, extent)
        except RuntimeError as error:
            line.keep(size, f"the copy out failed: {str(error).splitlines()[0][:120]}")
            link.pool.put(buffer)
            if extent is not None:
                self.disk.release(extent)
            return None
        line.swaps += 1
        line.moved_bytes += size
        line.copied_bytes += source.nbytes
        return Swapped(self, source, size, line, place)

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
        self.pools.clear()
        self.links.clear()
        if self._disk is not None:
            self._disk.close()
            self._disk = None


class Departures:
    """What leaves while one layer runs: each storage once."""

    def __init__(self, manager: SwapManager) -> None:
        self.manager = manager
        self.known: dict[int, tuple[StorageWeakRef, Swapped]] = {}
        self.latest: list[Swapped] = []
        """What the last tensor that was asked for consists of."""

    def out(self, tensor: Tensor, swap: Swap, line: Line, due: int) -> SavedPart:
        """Start taking ``tensor`` out of the device's memory; itself, if it has to stay.

        Its memory is let go when operator ``due`` is reached.
        """
        self.latest = []
        # What is held here must not hold the graph, which holds this.
        return self._out(without_graph(tensor), swap, line, due)

    def find(self, tensor: Tensor) -> Swapped | SwappedView | _Parts | None:
        """How ``tensor`` can be had back, if its storage has left."""
        names, context = inner_tensors(tensor)
        if names:
            parts = [part for name in names if (part := self.find(getattr(tensor, name))) is not None]
            return _Parts(tensor, names, context, parts) if len(parts) == len(names) else None
        known = self.known.get(storage_key(tensor))
        if known is None or known[0].expired():
            return None
        return self._as_seen(known[1], tensor)

    def _out(self, tensor: Tensor, swap: Swap, line: Line, due: int) -> SavedPart:
        names, context = inner_tensors(tensor)
        if names:
            parts = [self._out(getattr(tensor, name), swap, line, due) for name in names]
            return tensor if all(isinstance(part, Tensor) for part in parts) else _Parts(tensor, names, context, parts)
        key = storage_key(tensor)
        known = self.known.get(key)
        if known is not None and not known[0].expired():
            self.latest.append(known[1])
            return self._as_seen(known[1], tensor)
        size = tensor.untyped_storage().nbytes()
        if size < self.manager.limits.minimum_bytes:
            line.keep(size, "smaller than the minimum")
            return tensor
        source, whole = _departing(tensor, size)
        swapped = self.manager.take(source, size, swap, line)
        if swapped is None:
            return tensor
        self.latest.append(swapped)
        self.manager.schedule.leave(swapped.reference, size, due)
        if not whole:
            return _Gathered(swapped, tensor)
        self.known[key] = (weak_storage(tensor), swapped)
        return self._as_seen(swapped, tensor)

    def _as_seen(self, swapped: Swapped, tensor: Tensor) -> Swapped | SwappedView:
        same = swapped.shape == tensor.shape and swapped.dtype is tensor.dtype and tensor.is_contiguous()
        return swapped if same else SwappedView(swapped, tensor)


def _departing(tensor: Tensor, size: int) -> tuple[Tensor, bool]:
    """What of ``tensor`` is copied: its whole storage, or, if it is less than half of that, only itself."""
    item = tensor.dtype.itemsize
    used = tensor.numel() * item
    if used == size and tensor.is_contiguous():
        return tensor, True
    if size % item == 0 and (2 * used >= size or 0 in tensor.stride()):
        return tensor.as_strided((size // item,), (1,), 0), True
    return tensor.contiguous(), False

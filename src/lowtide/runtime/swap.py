"""Take tensors out of the device's memory in forward: where they go, and each storage once."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from lowtide._torch_private.modes import DisableTorchFunction
from lowtide._torch_private.nodes import without_graph
from lowtide._torch_private.storages import StorageWeakRef, storage_key, weak_storage
from lowtide._torch_private.subclasses import PLAIN, taken_apart
from lowtide._torch_private.versions import own_version
from lowtide.operators.saved import Kept, PackHook, Saved
from lowtide.policy import Swap
from lowtide.runtime.disk import DiskFile, Extent
from lowtide.runtime.host import HostPool
from lowtide.runtime.host_copy import DiskCopy, HostCopy
from lowtide.runtime.ledger import Ledger, Line
from lowtide.runtime.limits import Limits
from lowtide.runtime.link import Link
from lowtide.runtime.module_state import Attributes, BufferCopies
from lowtide.runtime.outside import Outside
from lowtide.runtime.schedule import Prefetching, Schedule
from lowtide.runtime.swapped import Reloads, Swapped, SwappedSlice, SwappedView
from lowtide.runtime.view import SavedParts, as_stored

__all__ = ["Offloads", "SwapManager"]


class SwapManager:
    """All that is swapped of one model: host memory, the disk, the links, and their limits."""

    def __init__(self, limits: Limits, ledger: Ledger) -> None:
        self.limits, self.ledger = limits, ledger
        self.schedule, self.reloads = Schedule(limits.in_flight_bytes), Reloads(limits.in_flight_bytes)
        self.host_pool = HostPool(limits.host_bytes, pinned=False)
        self.pinned_pool = HostPool(limits.host_bytes, pinned=True)
        self.links: dict[torch.device, Link] = {}
        self._disk: DiskFile | None = None
        self.buffers, self.outside = BufferCopies(), Outside()
        """What is known of the modules whose calls are captured."""
        self._attributes: dict[nn.Module, Attributes] = {}
        self.keep: PackHook | None = None
        """Packs what the Policy keeps, so that the rescue can still evict it; None: it is kept as it is."""

    def attributes_of(self, module: nn.Module) -> Attributes:
        """A module's attributes now; hardly ever have they changed since it was last called."""
        found = self._attributes.get(module)
        if found is None or not found.unchanged():
            found = Attributes((module,), self.outside)
            if not found.tensors:  # which would be kept alive
                self._attributes[module] = found
        return found

    @property
    def disk(self) -> DiskFile:
        """The file of the disk tier, made when it is first needed."""
        if self._disk is None:
            self._disk = DiskFile(self.limits.disk_directory, self.limits.disk_bytes)
        return self._disk

    def link(self, device: torch.device) -> Link:
        """The link between a device and the host."""
        found = self.links.get(device)
        if found is None:
            pool = self.host_pool if device.type == "cpu" else self.pinned_pool
            found = self.links[device] = Link(device, pool, self.ledger)
        return found

    def offload(self, source: Tensor, size: int, swap: Swap, line: Line) -> Swapped | None:
        """Start copying ``source``, which holds a storage of ``size`` bytes; None if it has to be kept."""
        link = self.link(source.device)
        buffer = link.pool.get(line.stash, source.shape, source.dtype, source.nbytes)
        if buffer is None:
            line.keep(size, "the limit of host memory is reached")
            return None
        extent = self._extent(source.nbytes, line) if swap.tier == "disk" else None
        try:
            if extent is None:
                copy = HostCopy(link, source, buffer, line)
            else:
                copy = DiskCopy(link, source, buffer, line, self.disk, extent)
            swapped = Swapped(self.reloads, source, size, line, copy)
        except RuntimeError as error:
            line.keep(size, f"the offload failed: {str(error).splitlines()[0][:120]}")
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

    def _extent(self, size: int, line: Line) -> Extent | None:
        """Room on disk; None if there is none, and host memory is used."""
        try:
            extent = self.disk.reserve(size)
        except OSError as error:  # no such directory, or no file can be made in it
            line.note(f"the disk failed, host memory is used: {error.strerror or error}")
            return None
        if extent is None:
            line.note("the limit of the disk is reached: host memory is used")
        return extent

    def kept_by_rescue(self, pack: PackHook) -> PackHook:
        """As ``pack``, but what would be kept as it is goes to the rescue, if that is armed."""
        keep = self.keep
        if keep is None:
            return pack

        def pack_and_keep(tensor: Tensor) -> Saved:
            with DisableTorchFunction():
                saved = pack(tensor)
                if type(saved) is Prefetching:
                    if type(saved.saved) is Kept:
                        saved.saved = keep(saved.saved.kept)
                    return saved
                return keep(saved.kept) if type(saved) is Kept else saved

        return pack_and_keep

    def close(self) -> None:
        """Give back everything that nothing refers to any more."""
        for line in self.ledger.lines.values():
            line.stash.clear()
        self.links.clear()
        self._attributes.clear()
        self._disk = None


class Offloads:
    """What is offloaded while one layer runs: each storage once."""

    __slots__ = ("known", "latest", "manager")

    def __init__(self, manager: SwapManager) -> None:
        self.manager = manager
        self.known: dict[int, tuple[StorageWeakRef, int, Swapped, torch.Size, torch.dtype]] = {}
        self.latest: list[Swapped] = []
        """What of the last packed tensor will have to be reloaded."""

    def pack(self, tensor: Tensor, swap: Swap, line: Line, due: int, *, alone: bool = False) -> Saved | None:
        """Start offloading ``tensor``; None if it has to be kept.

        Its memory is freed when operator ``due`` is reached. ``alone`` says that nothing else of its storage follows.
        """
        self.latest = []
        # What is held here must not hold the graph, which holds this.
        return self._pack(without_graph(tensor), swap, line, due, alone)

    def reload_at(self, due: int) -> None:
        """Reload what was packed last when backward reaches operator ``due``."""
        for swapped in self.latest:
            self.manager.schedule.reload_at(weakref.ref(swapped), due)

    def find(self, tensor: Tensor) -> Saved | None:
        """How ``tensor`` can be reloaded, if its storage is offloaded."""
        if type(tensor) not in PLAIN:
            whole = taken_apart(tensor)
            parts = {name: self.find(part) for name, part in whole.tensors.items()} if whole is not None else {}
            offloaded = {name: part for name, part in parts.items() if part is not None}
            return SavedParts(whole, offloaded) if whole is not None and len(offloaded) == len(parts) else None
        known = self.known.get(storage_key(tensor))
        if known is None or known[0].expired() or known[1] != own_version(tensor):  # written to since: another value
            return None
        swapped, shape, dtype = known[2:]
        self.latest.append(swapped)
        same = shape == tensor.shape and dtype is tensor.dtype and tensor.is_contiguous()
        same = same and not (tensor.is_conj() or tensor.is_neg())
        return swapped if same else SwappedView(swapped, tensor)

    def _pack(self, tensor: Tensor, swap: Swap, line: Line, due: int, alone: bool) -> Saved | None:
        if type(tensor) not in PLAIN:
            whole = taken_apart(tensor)
            if whole is None or tensor.is_nested:  # the rows of a nested one are known by the tensor of their offsets
                line.keep(0, f"a {type(tensor).__name__} cannot be taken apart")
                return None
            parts = {name: self._pack(part, swap, line, due, alone) for name, part in whole.tensors.items()}
            if not any(parts.values()):
                return None
            kept = {name: part or Kept(whole.tensors[name]) for name, part in parts.items()}
            return SavedParts(whole, kept)
        if tensor.layout is not torch.strided:
            line.keep(0, f"a tensor of layout {tensor.layout} is kept")
            return None
        if self.known:
            found = self.find(tensor)
            if found is not None:
                return found
        return self._offload(tensor, swap, line, due, alone)

    def _offload(self, tensor: Tensor, swap: Swap, line: Line, due: int, alone: bool) -> Saved | None:
        manager, size = self.manager, tensor.untyped_storage().nbytes()
        if size < manager.limits.minimum_bytes:
            line.keep(size, "smaller than the minimum")
            return None
        source, entire = _offloaded_part(as_stored(tensor), size)
        if not entire and (tensor.is_conj() or tensor.is_neg()):
            line.keep(size, "a part of a storage, seen as conjugates or with the other sign")
            return None
        swapped = manager.offload(source, size, swap, line)
        if swapped is None:
            return None
        self.latest.append(swapped)
        manager.schedule.free_at(weakref.ref(swapped), size, due)
        if not entire:
            return SwappedSlice(swapped, tensor)
        if not alone:
            version = own_version(tensor)
            self.known[storage_key(tensor)] = (weak_storage(tensor), version, swapped, source.shape, source.dtype)
        return swapped if source is tensor else SwappedView(swapped, tensor)


def _offloaded_part(tensor: Tensor, size: int) -> tuple[Tensor, bool]:
    """What of ``tensor`` is copied: its whole storage, or, if it is less than half of that, only itself."""
    item = tensor.dtype.itemsize
    used = tensor.numel() * item
    if used == size and tensor.is_contiguous():
        return tensor, True
    if size % item == 0 and (2 * used >= size or 0 in tensor.stride()):
        return tensor.as_strided((size // item,), (1,), 0), True
    return tensor.contiguous(), False

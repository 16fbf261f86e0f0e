"""Hold what is saved for backward so that it can be offloaded at any moment: by the rescue, and while profiling.

[Note: saved storages]
Autograd holds an ``OffloadableTensor`` in place of a saved tensor, which holds the tensor without its graph. All that
see one storage share one ``OffloadableStorage``, which only they hold: when the last of them is freed, the storage is.
``SavedStorages`` knows every storage by a weak reference, in the order in which they were first saved.

Offloading a storage copies it to the host and drops what its tensors hold. Its device memory is free then, unless other
code holds a tensor of it. Torch counts a storage's tensors, so the rescue knows that before, and leaves such a storage
alone: it is the input of an operator that is running, or a variable of the model's forward.

A tensor that is unpacked after it was offloaded copies the storage back: the same bytes, shape and strides. That may
run out of memory and evict others; never itself, since it is on the host.

One lock guards all storages. Nothing that runs under it asks for another lock, and a thread that holds it may take it
again: a reload may have to make room. Evictions wait for the whole device first. They are rare, they run on whatever
stream the failed operator ran on, and an allocator that is out of memory has waited for the device already.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lowtide._torch_private.modes import DisableTorchFunction, unseen_by_modes
from lowtide._torch_private.nodes import without_graph
from lowtide._torch_private.storages import StorageWeakRef, storage_address, storage_users, weak_storage
from lowtide._torch_private.subclasses import PLAIN, taken_apart
from lowtide._torch_private.versions import count_of_writes, own_version, version_of
from lowtide._torch_private.views import view_base
from lowtide.adaptive.counts import Counts
from lowtide.operators.saved import Saved, kept_apart
from lowtide.out_of_memory import is_out_of_memory
from lowtide.runtime.view import SavedParts, View

__all__ = ["OffloadableStorage", "OffloadableTensor", "SavedStorages", "bytes_of"]


class SavedStorages:
    """Everything that is saved for backward and can be offloaded."""

    def __init__(
        self,
        smallest: int,
        counts: Counts,
        *,
        profiling: bool = False,
        kept: Callable[[OffloadableStorage], None] = lambda _: None,
    ) -> None:
        """Storages below ``smallest`` bytes are kept. ``kept`` is called with the storage of each tensor.

        While ``profiling``, what is reloaded is freed as soon as it has been used, and storages of the host are copied
        as well.
        """
        self.smallest, self.counts, self.profiling, self.kept = smallest, counts, profiling, kept
        self.static: frozenset[int] = frozenset()
        """The storages of parameters and buffers, which are never offloaded."""
        self.lock = threading.RLock()
        self.known: dict[int, weakref.ReferenceType[OffloadableStorage]] = {}
        self.count = 0

    def pack(self, tensor: Tensor) -> Saved:
        """What autograd holds in place of ``tensor``."""
        if type(tensor) in PLAIN:
            with unseen_by_modes():
                return self._pack_plain(tensor)
        parts = None if isinstance(tensor, nn.Parameter) else taken_apart(tensor)
        if parts is None or isinstance(view_base(tensor), nn.Parameter):
            return kept_apart(tensor)
        return SavedParts(parts, {name: self.pack(part) for name, part in parts.tensors.items()})

    def _pack_plain(self, tensor: Tensor) -> Saved:
        if (
            type(tensor) is nn.Parameter
            or type(view_base(tensor)) is nn.Parameter
            or tensor.layout is not torch.strided
        ):
            return kept_apart(tensor)
        storage = tensor.untyped_storage()
        key = storage_address(storage)
        if (tensor.is_cpu and not self.profiling) or key in self.static or storage.nbytes() < self.smallest:
            return kept_apart(tensor)
        with self.lock:
            found = self.find(tensor)
            if found is None:
                self.count += 1
                found = OffloadableStorage(self, self.count)
                self.note(found, key)
            self.kept(found)
            return OffloadableTensor(found, tensor)

    def find(self, tensor: Tensor) -> OffloadableStorage | None:
        """The storage of a plain tensor, if it is on the device, or if its copy on the host is of the same version."""
        reference = self.known.get(storage_address(tensor.untyped_storage()))
        found = None if reference is None else reference()
        return found if found is not None and found.is_current() else None

    def evict(self, wanted: float) -> int:
        """Offload storages, the oldest first, until so many bytes are free; how many are."""
        freed = 0
        with self.lock, DisableTorchFunction():
            known = [found for reference in list(self.known.values()) if (found := reference()) is not None]
            known.sort(key=lambda storage: storage.number)
            waited = False
            for storage in known:
                if freed >= wanted:
                    break
                if not storage.is_alone():
                    continue
                if not waited:
                    torch.accelerator.synchronize()
                    waited = True
                freed += storage.offload()
                self.forget(storage)
            self.counts.offloaded_bytes += freed
        return freed

    def note(self, storage: OffloadableStorage, key: int) -> None:
        """A storage is on the device."""
        storage.key = key
        self.known[key] = weakref.ref(storage)

    def forget(self, storage: OffloadableStorage) -> None:
        """It is no longer: others may get its address."""
        reference = self.known.get(storage.key)
        if reference is not None and reference() in (None, storage):
            del self.known[storage.key]


class OffloadableTensor:
    """A tensor that was saved for backward, wherever it is."""

    __slots__ = ("__weakref__", "alias", "storage", "version", "view")

    def __init__(self, storage: OffloadableStorage, tensor: Tensor) -> None:
        self.storage = storage
        self.alias: Tensor | None = None
        self.view: View | None = None
        self.version = own_version(tensor)
        if storage.host is None:
            self.alias = without_graph(tensor)
            storage.tensors.append(weakref.ref(self))
        else:
            self.view = View.by(tensor)

    def tensor(self) -> Tensor:
        """The tensor; RuntimeError if it was modified in place since it was saved."""
        alias = self.alias  # another thread may offload it meanwhile
        if alias is None:
            alias = self.storage.seen_by(self)
        if own_version(alias) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation:"
                f" a tensor of shape {tuple(alias.shape)} is at version {own_version(alias)}; expected version"
                f" {self.version}"
            )
        return alias


MODIFIED = -1
"""The version of a tensor that was modified in place before it was offloaded: autograd would refuse it, and so do
we."""


class OffloadableStorage:
    """One storage, on the device or on the host. See [Note: saved storages]."""

    __slots__ = (
        "__weakref__", "counter", "device", "dtype", "host", "key", "known", "number", "origin", "reloaded", "tensors",
        "version", "whole",
    )  # fmt: skip

    def __init__(self, known: SavedStorages, number: int) -> None:
        self.known, self.number = known, number
        """Counts up: the lower, the older."""
        self.key = 0
        self.tensors: list[weakref.ReferenceType[OffloadableTensor]] = []
        self.whole: Tensor | None = None
        """All of the storage, after it was reloaded."""
        self.host: Tensor | None = None
        """Its bytes, if they are on the host."""
        self.device, self.dtype = torch.device("cpu"), torch.uint8
        self.origin: StorageWeakRef | None = None
        """While profiling: the storage that was copied, which other code may still hold,"""
        self.counter, self.version = torch.empty(0), 0
        """and its version counter, with the version that was copied."""
        self.reloaded: weakref.ReferenceType[Any] | None = None
        """While profiling: the storage that was last reloaded, if it is still in use."""

    def __del__(self) -> None:
        self.known.forget(self)

    def is_current(self) -> bool:
        """Whether it is on the device, or its copy on the host is of the version that is there."""
        if self.host is None:
            return True
        if self.origin is None or self.origin.expired():  # type: ignore[no-untyped-call]
            return False
        return version_of(self.counter) == self.version

    def is_alone(self) -> bool:
        """Whether no other code holds a tensor of the storage."""
        held = self._held()
        return bool(held) and storage_users(held[0]) == len(held)

    def offload(self) -> int:
        """Copy the storage to the host and drop what our tensors hold; how many bytes it has."""
        tensors = [tensor for reference in self.tensors if (tensor := reference()) is not None]
        self.tensors = [weakref.ref(tensor) for tensor in tensors]
        held = self._held()
        if not held:  # offloaded before, or nothing wants it any more
            return 0
        storage = held[0].untyped_storage()
        size = storage.nbytes()
        self.device, self.dtype = held[0].device, held[0].dtype if size % held[0].dtype.itemsize == 0 else torch.uint8
        if self.known.profiling:
            self.origin, self.counter = weak_storage(held[0]), count_of_writes(held[0])
            self.version = version_of(self.counter)
        self._copy(bytes_of(storage, self.device))
        for tensor in tensors:
            alias = tensor.alias
            if alias is not None:
                tensor.view = View.by(alias)
                if own_version(alias) != tensor.version:
                    tensor.version = MODIFIED
                tensor.alias = None
        self.whole = None
        return size

    def renew(self, tensor: Tensor) -> None:
        """Copy the storage, which ``tensor`` sees, again: it was written to without a new version."""
        if self.host is not None:
            self._copy(bytes_of(tensor.untyped_storage(), tensor.device))

    def _copy(self, source: Tensor) -> None:
        with torch.no_grad(), unseen_by_modes():
            if self.host is None:
                self.host = _host_memory(source.nbytes, pinned=self.known.profiling and not source.is_cpu)
            self.host.copy_(source)

    def seen_by(self, tensor: OffloadableTensor) -> Tensor:
        """The tensor itself, reloaded if it is on the host."""
        with self.known.lock, DisableTorchFunction(), torch.no_grad():
            if tensor.alias is not None:
                return tensor.alias
            assert tensor.view is not None
            alias = tensor.view.of(self._on_device())
            if tensor.version != MODIFIED:
                tensor.version = own_version(alias)
            if not self.known.profiling:
                tensor.alias = alias
            return alias

    def _on_device(self) -> Tensor:
        if self.whole is not None:
            return self.whole
        storage = self.reloaded() if self.reloaded is not None else None
        if storage is not None:
            return torch.empty(0, dtype=self.dtype, device=self.device).set_(storage)
        whole = self._reload()
        if self.known.profiling:
            self.reloaded = weakref.ref(whole.untyped_storage())
        else:
            self.whole, self.host = whole, None
            self.known.note(self, storage_address(whole.untyped_storage()))
        return whole

    def _reload(self) -> Tensor:
        host = self.host
        assert host is not None
        while True:
            try:
                whole = torch.empty(host.nbytes // self.dtype.itemsize, dtype=self.dtype, device=self.device)
                break
            except RuntimeError as error:  # where the rescue's mode is on, it has made all the room that there is
                if not is_out_of_memory(error) or not self.known.evict(host.nbytes):
                    raise
        return whole.copy_(host.view(self.dtype))

    def _held(self) -> list[Tensor]:
        """The tensors by which the storage is held."""
        found = [] if self.whole is None else [self.whole]
        for reference in self.tensors:
            tensor = reference()
            if tensor is not None and tensor.alias is not None:
                found.append(tensor.alias)
        return found


def bytes_of(storage: Any, device: torch.device) -> Tensor:
    """All of a storage as bytes, with a version counter of its own."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))


def _host_memory(size: int, *, pinned: bool) -> Tensor:
    """Host memory; pinned copies are several times as fast, but there may be no more of it."""
    try:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
    except RuntimeError:
        return torch.empty(size, dtype=torch.uint8, device="cpu")

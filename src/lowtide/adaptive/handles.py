"""Hold what is saved for backward so that it can be sent to the host at any moment.

[Note: handles]
Autograd holds a ``Handle`` in place of a saved tensor, and the handle holds the tensor without its graph. All handles
of one storage share one ``_Stored``, which only they hold: when the last of them ends, the storage does. The book knows
every storage by a weak reference, in the order in which they were first saved.

Sending a storage away copies it to the host and drops what the handles hold. Its memory is free then, unless somebody
else holds a tensor of it; torch counts a storage's tensors, so that is known before, and such a storage is left alone:
it is the input of an operator that runs right now, or a variable of the model's forward.

A handle that is asked for what has left copies the storage back, and is as it was: the same bytes, shape and strides.
The copy may fail for want of memory and send others away; never itself, since it is away.

One lock guards the book. Nothing that runs under it asks for another lock, and a thread that holds it may take it
again: a copy back may have to make room. Evictions wait for the whole device first. They are rare, they run on whatever
stream the failed operator ran on, and an allocator that is out of memory has waited for the device already.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from lowtide._torch_private.modes import DisableTorchFunction, unseen_by_modes
from lowtide._torch_private.nodes import without_graph
from lowtide._torch_private.storages import storage_users
from lowtide._torch_private.subclasses import PLAIN, Subclass, taken_apart
from lowtide.adaptive.counts import Counts
from lowtide.operators.kept import kept_apart
from lowtide.out_of_memory import is_out_of_memory
from lowtide.runtime.saved import Saved, unpack
from lowtide.runtime.view import View

__all__ = ["Book", "Handle", "bytes_of"]


class Book:
    """Everything that is saved for backward and could leave."""

    def __init__(self, smallest: int, counts: Counts) -> None:
        self.counts, self.smallest = counts, smallest
        """Bytes; a smaller storage stays."""
        self.static: frozenset[int] = frozenset()
        """The storages of parameters and buffers, which stay."""
        self.lock = threading.RLock()
        self.here: dict[int, weakref.ReferenceType[_Stored]] = {}
        self.count = 0

    def keep(self, tensor: Tensor) -> Saved:
        """What autograd holds in place of ``tensor``."""
        if type(tensor) in PLAIN:
            with unseen_by_modes():
                return self._keep_plain(tensor)
        whole = None if isinstance(tensor, nn.Parameter) else taken_apart(tensor)
        if whole is None or isinstance(tensor._base, nn.Parameter):
            return kept_apart(tensor)
        parts = {name: self.keep(part) for name, part in whole.tensors.items()}
        return _Parts(whole._replace(tensors={}), parts)

    def _keep_plain(self, tensor: Tensor) -> Saved:
        if tensor.is_cpu or type(tensor) is nn.Parameter or type(tensor._base) is nn.Parameter:
            return kept_apart(tensor)
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.static or storage.nbytes() < self.smallest:
            return kept_apart(tensor)
        with self.lock:
            reference = self.here.get(key)
            stored = None if reference is None else reference()
            if stored is None:
                self.count += 1
                stored = _Stored(self, self.count)
                self._arrived(stored, key)
            return Handle(stored, without_graph(tensor))

    def evict(self, wanted: float) -> int:
        """Send storages to the host, the oldest first, until so many bytes are free; how many are."""
        freed = 0
        with self.lock, DisableTorchFunction():
            known = [stored for reference in list(self.here.values()) if (stored := reference()) is not None]
            known.sort(key=lambda stored: stored.number)
            waited = False
            for stored in known:
                if freed >= wanted:
                    break
                if not stored.alone():
                    continue
                if not waited:
                    torch.accelerator.synchronize()
                    waited = True
                freed += stored.leave()
            self.counts.sent_bytes += freed
        return freed

    def _arrived(self, stored: _Stored, key: int) -> None:
        stored.key = key
        self.here[key] = weakref.ref(stored)

    def _gone(self, stored: _Stored) -> None:
        reference = self.here.get(stored.key)
        if reference is not None and reference() in (None, stored):
            del self.here[stored.key]


class Handle:
    """A tensor that was saved for backward, wherever it is."""

    __slots__ = ("__weakref__", "alias", "stored", "version", "view")

    def __init__(self, stored: _Stored, alias: Tensor) -> None:
        self.stored = stored
        self.alias: Tensor | None = alias
        self.version = alias._version
        self.view: View | None = None
        stored.handles.append(weakref.ref(self))

    def tensor(self) -> Tensor:
        """The tensor, if nobody has written to it since it was saved."""
        alias = self.alias  # another thread may send it away meanwhile
        if alias is None:
            alias = self.stored.seen_by(self)
        if alias._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation:"
                f" a tensor of shape {tuple(alias.shape)} is at version {alias._version}; expected version"
                f" {self.version}"
            )
        return alias


class _Stored:
    """One storage, on the device or on the host. See [Note: handles]."""

    __slots__ = ("__weakref__", "book", "device", "dtype", "handles", "host", "key", "number", "whole")

    def __init__(self, book: Book, number: int) -> None:
        self.book, self.number = book, number
        """Counts up: the lower, the older."""
        self.key = 0
        self.handles: list[weakref.ReferenceType[Handle]] = []
        self.whole: Tensor | None = None
        """All of the storage, after it came back."""
        self.host: Tensor | None = None
        self.device, self.dtype = torch.device("cpu"), torch.uint8

    def __del__(self) -> None:
        self.book._gone(self)

    def alone(self) -> bool:
        """Whether nobody but the handles holds a tensor of the storage."""
        held = self._held()
        return bool(held) and storage_users(held[0]) == len(held)

    def leave(self) -> int:
        """Copy the storage to the host and let go of it; how many bytes that frees."""
        handles = [handle for reference in self.handles if (handle := reference()) is not None]
        self.handles = [weakref.ref(handle) for handle in handles]
        held = self._held()[0]
        storage = held.untyped_storage()
        size = storage.nbytes()
        self.device, self.dtype = held.device, held.dtype if size % held.dtype.itemsize == 0 else torch.uint8
        self.host = bytes_of(storage, held.device).cpu()
        for handle in handles:
            alias = handle.alias
            if alias is not None:
                handle.view = View.by(alias)
                if alias._version != handle.version:
                    handle.version = -1  # written to since it was saved: autograd would refuse it, and so do we
                handle.alias = None
        self.whole = None
        self.book._gone(self)
        return size

    def seen_by(self, handle: Handle) -> Tensor:
        """What a handle stands for, copied back if it is away."""
        with self.book.lock, DisableTorchFunction():
            if handle.alias is not None:
                return handle.alias
            if self.whole is None:
                self._come_back()
            assert self.whole is not None
            assert handle.view is not None
            handle.alias = alias = handle.view.of(self.whole)
            if handle.version != -1:
                handle.version = alias._version
            return alias

    def _come_back(self) -> None:
        host = self.host
        assert host is not None
        while True:
            try:
                whole = torch.empty(host.nbytes // self.dtype.itemsize, dtype=self.dtype, device=self.device)
                break
            except RuntimeError as error:  # where a mode watches, it has made all the room that there is
                if not is_out_of_memory(error) or not self.book.evict(host.nbytes):
                    raise
        whole.copy_(host.view(self.dtype))
        self.whole, self.host = whole, None
        self.book._arrived(self, whole.untyped_storage()._cdata)

    def _held(self) -> list[Tensor]:
        """The tensors by which the storage is held."""
        found = [] if self.whole is None else [self.whole]
        for reference in self.handles:
            handle = reference()
            if handle is not None and handle.alias is not None:
                found.append(handle.alias)
        return found


class _Parts:
    """A tensor subclass, such as a DTensor, whose parts are held by handles."""

    __slots__ = ("parts", "whole")

    def __init__(self, whole: Subclass, parts: dict[str, Saved]) -> None:
        self.whole, self.parts = whole, parts

    def tensor(self) -> Tensor:
        return self.whole.rebuilt({name: unpack(part) for name, part in self.parts.items()})


def bytes_of(storage: Any, device: torch.device) -> Tensor:
    """All of a storage as bytes; whoever writes into them is not counted in any other tensor's version."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))

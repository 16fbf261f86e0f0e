"""Hold what autograd saves in the host's memory: the least that a step needs of the device.

Slow, and for measuring only: each copy is waited for. One copy serves all tensors that see the same storage, and what
comes back is seen through the same views. It is exact: bytes leave and the same bytes come back. Parameters stay: they
are on the device in any case.

[Note: saved before filled]
An operator saves what it was given before its kernel runs, and some kernels then write into it, uncounted: the noise of
an RReLU is saved empty. So does whoever writes through ``.data``. Whoever sees kernels tells of what they have written;
unless that was counted, it is copied again. Where nobody sees them, what is not the operator's own result stays on the
device until another one saves something: each has a node of its own in autograd's graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from lowtide._torch_private.modes import DisableTorchFunction, unseen_by_modes
from lowtide._torch_private.nodes import is_own_output, node_number, without_graph
from lowtide._torch_private.storages import StorageWeakRef, storage_key, weak_storage
from lowtide._torch_private.subclasses import inner_tensor, subclass_wrapper, taken_apart
from lowtide._torch_private.versions import count_of_writes, version_of
from lowtide.operators.kept import Held, kept_apart
from lowtide.runtime.view import View, as_stored

__all__ = ["HostCopies"]


class HostCopies:
    """The copies of storages that are on the host now.

    ``at_once`` copies what is saved at once: then :meth:`written` has to be told of what kernels write.
    """

    def __init__(self, *, at_once: bool) -> None:
        self.at_once = at_once
        self.copies: WeakValueDictionary[int, _HostCopy] = WeakValueDictionary()
        self.latest: dict[int, _HostCopy] = {}
        """Those of the operator that saves now, by storage. See [Note: saved before filled]."""
        self.node = -1
        """The number of its node."""

    def hold(self, tensor: Tensor) -> Held:
        """Hold a tensor on the host; what has no storage of its own, or several, stays where it is."""
        node = node_number()
        if node != self.node:
            self.node = node
            for latest in self.latest.values():
                latest.leave()
            self.latest = {}
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return kept_apart(tensor)
        if tensor.layout is not torch.strided or (taken_apart(tensor) is not None and subclass_wrapper(tensor) is None):
            return kept_apart(tensor)
        with DisableTorchFunction(), torch.no_grad():
            view = View.by(tensor)
            plain = inner_tensor(tensor)
            key, version = plain.untyped_storage()._cdata, version_of(plain)
            copy: _HostCopy | None = self.copies.get(key)
            if copy is None or copy.version != version or copy.origin.expired():  # type: ignore[no-untyped-call]
                copy = self.copies[key] = _HostCopy(plain, version)
            self.latest[key] = copy
            if self.at_once or is_own_output(tensor):
                copy.leave()
            return _OnHost(copy, view)

    def written(self, tensors: Iterable[Tensor]) -> None:
        """A kernel has written into these."""
        for tensor in tensors if self.copies else ():
            copy: _HostCopy | None = self.copies.get(storage_key(tensor))
            if copy is not None and not copy.origin.expired():  # type: ignore[no-untyped-call]
                copy.renew(inner_tensor(tensor))


class _HostCopy:
    """A storage's bytes: on the device until the operator that saved it has ended, on the host from then on."""

    __slots__ = ("__weakref__", "back", "count", "device", "here", "host", "origin", "version")

    def __init__(self, tensor: Tensor, version: int) -> None:
        self.here: Tensor | None = _whole(tensor)
        self.device, self.version, self.count = tensor.device, version, count_of_writes(tensor)
        self.origin: StorageWeakRef = weak_storage(tensor)
        self.host: Tensor | None = None
        self.back: ref[Any] | None = None

    def leave(self) -> None:
        """Copy the bytes, if that is still to be done."""
        here = self.here
        if here is not None and here._version == self.version:  # otherwise whoever asks for it is refused
            self._copy(here)
            self.here = None

    def renew(self, tensor: Tensor) -> None:
        """The storage, which is that of ``tensor``, was written to: copy it again, unless that was counted."""
        if self.host is not None and version_of(self.count) == self.version:
            self._copy(_whole(tensor))

    def _copy(self, here: Tensor) -> None:
        with DisableTorchFunction(), torch.no_grad():
            if self.host is None:
                self.host = _host_memory(here.numel(), here.dtype, pinned=here.device.type != "cpu")
            self.host.copy_(here.view(self.host.dtype))

    def on_device(self) -> Tensor:
        """The bytes on their device: one storage for all who ask while it lives."""
        if self.here is not None:
            if self.here._version != self.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation:"
                    f" a storage of {self.here.nbytes} bytes is at version {self.here._version}; expected version"
                    f" {self.version}"
                )
            return self.here
        storage = self.back() if self.back is not None else None
        assert self.host is not None
        if storage is not None:
            return torch.empty(0, dtype=self.host.dtype, device=self.device).set_(storage, 0, self.host.shape, (1,))
        there = torch.empty_like(self.host, device=self.device).copy_(self.host)
        self.back = ref(there.untyped_storage())
        return there


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor's storage, as the numbers are stored; it counts the writes that the tensor counts."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    with unseen_by_modes():  # under a mode the counts would be two
        return as_stored(without_graph(tensor)).as_strided((count,), (1,), 0)


def _host_memory(count: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """Memory of the host; pinned copies are several times as fast, but there may be no more of it."""
    try:
        return torch.empty(count, dtype=dtype, device="cpu", pin_memory=pinned)
    except RuntimeError:
        return torch.empty(count, dtype=dtype, device="cpu")


class _OnHost:
    """A saved tensor whose bytes are on the host."""

    __slots__ = ("copy", "view")

    def __init__(self, copy: _HostCopy, view: View) -> None:
        self.copy, self.view = copy, view

    def tensor(self) -> Tensor:
        """The tensor, on its device."""
        with DisableTorchFunction(), torch.no_grad():
            return self.view.of(self.copy.on_device())

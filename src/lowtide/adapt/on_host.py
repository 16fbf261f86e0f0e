"""Hold what autograd saves in the host's memory, copied at once: the least that a step needs of the device.

Slow, and for measuring only: each copy is waited for. One copy serves all tensors that see the same storage, and what
comes back is seen through the same views. It is exact: bytes leave and the same bytes come back. Parameters stay: they
are on the device in any case.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from lowtide._torch_private import (
    DisableTorchFunction,
    StorageWeakRef,
    inner_tensor,
    subclass_wrapper,
    taken_apart,
    version_of,
    weak_storage,
)
from lowtide.operators.kept import Held, kept_apart
from lowtide.runtime.view import View

__all__ = ["HostCopies"]


class HostCopies:
    """The copies of storages that are on the host now."""

    def __init__(self) -> None:
        self.copies: WeakValueDictionary[int, _HostCopy] = WeakValueDictionary()

    def hold(self, tensor: Tensor) -> Held:
        """Hold a tensor on the host; what has no storage of its own, or several, stays where it is."""
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return kept_apart(tensor)
        if tensor.layout is not torch.strided or (taken_apart(tensor) is not None and subclass_wrapper(tensor) is None):
            return kept_apart(tensor)
        with DisableTorchFunction(), torch.no_grad():
            view = View.by(tensor)
            plain = inner_tensor(tensor)
            key, version = plain.untyped_storage()._cdata, version_of(plain)
            copy = self.copies.get(key)
            if copy is None or copy.version != version or copy.origin.expired():  # type: ignore[no-untyped-call]
                copy = self.copies[key] = _HostCopy(plain, version)
            return _OnHost(copy, view, written=bool(tensor._version))


class _HostCopy:
    """A storage's bytes on the host."""

    __slots__ = ("__weakref__", "back", "device", "host", "origin", "version")

    def __init__(self, tensor: Tensor, version: int) -> None:
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        whole = tensor.as_strided((count,), (1,), 0)
        self.device, self.version = tensor.device, version
        self.origin: StorageWeakRef = weak_storage(tensor)
        self.host = _host_memory(count, tensor.dtype, pinned=tensor.device.type != "cpu").copy_(whole)
        self.back: ref[Any] | None = None

    def on_device(self) -> Tensor:
        """The bytes on their device again: one storage for all who ask while it lives."""
        storage = self.back() if self.back is not None else None
        if storage is not None:
            return torch.empty(0, dtype=self.host.dtype, device=self.device).set_(storage, 0, self.host.shape, (1,))
        there = torch.empty_like(self.host, device=self.device).copy_(self.host)
        self.back = ref(there.untyped_storage())
        return there


def _host_memory(count: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """Memory of the host; pinned copies are several times as fast, but there may be no more of it."""
    try:
        return torch.empty(count, dtype=dtype, pin_memory=pinned)
    except RuntimeError:
        return torch.empty(count, dtype=dtype)


class _OnHost:
    """A saved tensor whose bytes are on the host."""

    __slots__ = ("copy", "view", "written")

    def __init__(self, copy: _HostCopy, view: View, *, written: bool) -> None:
        self.copy, self.view, self.written = copy, view, written

    def tensor(self) -> Tensor:
        """The tensor, on its device."""
        with DisableTorchFunction(), torch.no_grad():
            return self.view.of(self.copy.on_device())

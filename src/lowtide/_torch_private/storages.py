"""Storages: identity, size, users, and callbacks when one is resized."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lowtide._torch_private.modes import DisableTorchFunction
from lowtide._torch_private.needed import needed_for
from lowtide._torch_private.subclasses import inner_tensor

with needed_for("following storages"):
    from torch._C import _storage_Use_Count
    from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
    from torch.multiprocessing.reductions import StorageWeakRef

__all__ = [
    "StorageWeakRef",
    "has_storage",
    "resize_watchers",
    "storage_address",
    "storage_bytes",
    "storage_key",
    "storage_of",
    "storage_users",
    "stored_tensor",
    "weak_storage",
]


Resize: TypeAlias = Callable[[Any, int], Any]
"""Resizes a storage."""


AroundResize: TypeAlias = Callable[[Resize, Any, int], Any]
"""Given how a storage would be resized, the storage and its new size, resizes it."""


class _ResizeWatchers:
    """Callbacks around the resizing of storages, which is no kernel and seen by no mode.

    The method is replaced while there is a callback: one replacement for all, since they do not end in order.
    """

    def __init__(self) -> None:
        self.watchers: list[AroundResize] = []
        self.plain: Resize = torch.UntypedStorage.resize_
        watchers = self.watchers

        def resize_(storage: Any, size: int) -> Any:
            call = self.plain
            for around in watchers:
                call = partial(around, call)
            return call(storage, size)

        self.replaced = resize_

    def add(self, around: AroundResize) -> None:
        """From now on ``around`` resizes storages."""
        if not self.watchers and torch.UntypedStorage.resize_ is not self.replaced:
            self.plain = torch.UntypedStorage.resize_
            torch.UntypedStorage.resize_ = self.replaced  # type: ignore[method-assign, assignment]
        self.watchers.append(around)

    def remove(self, around: AroundResize) -> None:
        """No longer; nothing if it did not."""
        self.watchers[:] = [one for one in self.watchers if one != around]
        if not self.watchers and torch.UntypedStorage.resize_ is self.replaced:
            torch.UntypedStorage.resize_ = self.plain  # type: ignore[method-assign, assignment]


resize_watchers = _ResizeWatchers()


storage_address: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""The address of a storage object: unique while it lives."""


def storage_key(tensor: Tensor) -> int:
    """The address of the tensor's storage object: equal for views, unique while the storage lives."""
    key: int = storage_of(tensor)._cdata
    return key


def storage_bytes(tensor: Tensor) -> int:
    """The size of the tensor's whole storage on this rank."""
    return storage_of(tensor).nbytes()


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Where a tensor's values are; of a sparse one, without its indices."""
    try:
        return inner_tensor(tensor).untyped_storage()
    except NotImplementedError:
        return stored_tensor(tensor).untyped_storage()


def has_storage(tensor: Tensor) -> bool:
    """Whether a tensor has its values in one storage of its own: not those of sparse layouts, nor those inside vmap."""
    try:
        inner_tensor(tensor).untyped_storage()
    except NotImplementedError:
        return False
    return True


def stored_tensor(tensor: Tensor) -> Tensor:
    """The tensor that has the values of one that has no storage itself: sparse, or wrapped by vmap, jvp or grad."""
    with DisableTorchFunction():
        while is_functorch_wrapped_tensor(tensor):
            tensor = get_unwrapped(tensor)
        if tensor.layout is torch.sparse_coo:
            tensor = tensor._values()
        elif tensor.layout is not torch.strided:
            tensor = tensor.values()
        return inner_tensor(tensor)


def storage_users(tensor: Tensor) -> int:
    """How many tensors see the storage of a plain tensor."""
    storage = tensor.untyped_storage()  # its Python object holds it once as well
    count: int = _storage_Use_Count(storage._cdata)
    return count - 1


def weak_storage(tensor: Tensor) -> StorageWeakRef:
    """A weak reference to the tensor's storage."""
    return StorageWeakRef(storage_of(tensor))

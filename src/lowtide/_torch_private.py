"""Every private name of torch that lowtide uses; ``tests/test_torch_private.py`` holds each to its word."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "FakeTensorMode",
    "StorageWeakRef",
    "TorchDispatchMode",
    "at_end_of_backward",
    "autocast_contexts",
    "current_backward",
    "inner_tensor",
    "inner_tensors",
    "rebuilt_subclass",
    "storage_bytes",
    "storage_key",
    "tree_leaves",
    "tree_map",
    "weak_storage",
    "written_arguments",
]


def inner_tensor(tensor: Tensor) -> Tensor:
    """The plain tensor that holds the bytes: of a DTensor its local part, of a plain tensor itself."""
    while type(tensor) not in _PLAIN and hasattr(tensor, "__tensor_flatten__"):
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    return tensor


_PLAIN = (Tensor, torch.nn.Parameter)


def inner_tensors(tensor: Tensor) -> tuple[list[str], Any]:
    """The names of the tensors that a subclass consists of, and what else it takes to rebuild it; none if plain."""
    if type(tensor) in _PLAIN or not hasattr(tensor, "__tensor_flatten__"):
        return [], None
    return tensor.__tensor_flatten__()  # type: ignore[no-any-return]


def rebuilt_subclass(kind: Any, parts: dict[str, Tensor], context: Any, shape: Any, stride: Any) -> Tensor:
    """The reverse of :func:`inner_tensors`."""
    tensor: Tensor = kind.__tensor_unflatten__(parts, context, shape, stride)
    return tensor


def current_backward() -> int:
    """A number for the backward that runs on this thread; -1 if none does."""
    number: int = torch._C._current_graph_task_id()
    return number


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward that is running is over."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def storage_key(tensor: Tensor) -> int:
    """The address of the tensor's storage object: equal for views, unique while the storage lives."""
    key: int = inner_tensor(tensor).untyped_storage()._cdata
    return key


def storage_bytes(tensor: Tensor) -> int:
    """The size of the tensor's whole storage on this rank."""
    return inner_tensor(tensor).untyped_storage().nbytes()


def weak_storage(tensor: Tensor) -> StorageWeakRef:
    """A weak reference to the tensor's storage."""
    return StorageWeakRef(inner_tensor(tensor).untyped_storage())


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that a kernel writes into, by its schema."""
    arguments = func._schema.arguments
    given = [*args, *([None] * (len(arguments) - len(args)))]
    return [
        kwargs.get(argument.name, value)
        for argument, value in zip(arguments, given, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def autocast_contexts() -> Callable[[], list[AbstractContextManager[None]]]:
    """Remember how autocast is set now; the returned function gives contexts that set it so again."""
    kinds = ["cpu"]
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        kinds.append(accelerator.type)
    settings = [
        (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled())
        for kind in kinds
    ]
    return lambda: [
        torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache)
        for kind, dtype, enabled, cache in settings
    ]

"""Every private name of torch that lowtide uses; ``tests/test_torch_private.py`` holds each to its word."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "PLAIN",
    "AutocastState",
    "DisableTorchFunction",
    "FakeTensorMode",
    "StorageWeakRef",
    "Subclass",
    "TorchDispatchMode",
    "at_end_of_backward",
    "autocast_contexts",
    "autocast_state",
    "current_backward",
    "inner_tensor",
    "is_own_output",
    "storage_bytes",
    "storage_key",
    "taken_apart",
    "tree_leaves",
    "tree_map",
    "weak_storage",
    "written_arguments",
]


PLAIN = (Tensor, torch.nn.Parameter)
"""The classes of tensors that hold their bytes themselves."""


def inner_tensor(tensor: Tensor) -> Tensor:
    """The plain tensor that holds the bytes: of a DTensor its local part, of a plain tensor itself."""
    while type(tensor) not in PLAIN and hasattr(tensor, "__tensor_flatten__"):
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    return tensor


class Subclass(NamedTuple):
    """A tensor subclass, such as a DTensor, taken apart."""

    kind: type[Tensor]
    tensors: dict[str, Tensor]
    """The tensors that hold its bytes."""
    rest: dict[str, Any]
    """Its other parts, such as a device mesh."""
    context: Any
    shape: torch.Size
    stride: tuple[int, ...]

    def rebuilt(self, tensors: dict[str, Tensor]) -> Tensor:
        """The same with other tensors."""
        kind: Any = self.kind
        made: Tensor = kind.__tensor_unflatten__(self.rest | tensors, self.context, self.shape, self.stride)
        return made


def taken_apart(tensor: Tensor) -> Subclass | None:
    """A subclass in its parts; None for a tensor that has none."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return None
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    tensors = {name: part for name, part in parts.items() if isinstance(part, Tensor)}
    rest = {name: part for name, part in parts.items() if name not in tensors}
    return Subclass(type(tensor), tensors, rest, context, tensor.shape, tensor.stride())


def current_backward() -> int:
    """A number for the backward that runs on this thread; -1 if none does."""
    number: int = torch._C._current_graph_task_id()
    return number


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward that is running is over."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def is_own_output(tensor: Tensor) -> bool:
    """Whether ``tensor``, which is just being saved, is saved by the very node that made it."""
    node: Any = tensor.grad_fn
    latest: int = torch._C._autograd._get_sequence_nr() - 1
    return node is not None and node._sequence_nr() == latest


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


AutocastState: TypeAlias = tuple[tuple[str, torch.dtype | None], ...]
"""For each kind of device what autocast casts to; None where it is off."""


def autocast_state() -> AutocastState:
    """How autocast is set now."""
    enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    return tuple([(kind, dtype(kind) if enabled(kind) else None) for kind in _device_kinds()])


def autocast_contexts(state: AutocastState) -> list[AbstractContextManager[None]]:
    """Contexts that set autocast as it was, where that is another way than now."""
    now = autocast_state()
    if now == state:
        return []
    return [
        torch.autocast(kind, dtype=dtype, enabled=dtype is not None)
        for (kind, dtype), setting in zip(state, now, strict=True)
        if (kind, dtype) != setting
    ]


@cache
def _device_kinds() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)

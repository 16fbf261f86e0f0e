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
    "autocast_contexts",
    "storage_key",
    "tree_leaves",
    "tree_map",
    "written_arguments",
]


def storage_key(tensor: Tensor) -> int:
    """The address of the tensor's storage object: equal for views, unique while the storage lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


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

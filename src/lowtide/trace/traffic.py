"""What a kernel is given and moves: bytes, the type of its numbers, and what a collective sends."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from lowtide._torch_private.collectives import group_named
from lowtide._torch_private.storages import storage_bytes

__all__ = ["bytes_read", "communication", "computed_in"]


def bytes_read(tensor: Tensor) -> int:
    """The bytes that are really there: a dimension of stride 0 is read once."""
    if tensor.device.type == "cpu" and tensor.dim() == 0:
        return 0
    if tensor.layout is not torch.strided:
        return storage_bytes(tensor)
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return count * tensor.dtype.itemsize


def computed_in(tensors: list[Tensor]) -> str:
    """What a kernel computes in."""
    floating = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    chosen = floating[0] if floating else (tensors[0].dtype if tensors else torch.float32)
    return str(chosen).removeprefix("torch.")


def communication(func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> tuple[int, int]:
    """The ranks of a collective and the bytes of its full buffer; zeros for anything else."""
    if func.namespace not in ("c10d", "_c10d_functional", "c10d_functional", "_dtensor"):
        return 0, 0
    ranks = 0
    for value in [*args, *kwargs.values()]:
        if isinstance(value, torch.ScriptObject):
            with suppress(RuntimeError, TypeError):  # the reduction is one too
                ranks = torch.distributed.ProcessGroup.unbox(value).size()
        elif isinstance(value, str) and value not in _REDUCTIONS:
            ranks = group_named(value).size()
    return ranks or 1, max((bytes_read(tensor) for tensor in tensors), default=0)


_REDUCTIONS = {"sum", "avg", "max", "min", "product"}

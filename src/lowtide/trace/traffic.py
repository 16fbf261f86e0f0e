"""What a kernel is given and moves: bytes, the type of its numbers, and what a collective sends."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lowtide._torch_private.collectives import group_named
from lowtide._torch_private.storages import storage_bytes
from lowtide.trace.layout import stride_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Communication", "bytes_read", "communication", "computed_in"]


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


class Communication(NamedTuple):
    """What a collective sends; zeros for anything else."""

    ranks: int = 0
    """How many take part."""
    stride: int = 1
    """How far apart they are."""
    message: int = 0
    """The bytes of the full buffer."""


def communication(func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Communication:
    """What a kernel sends to other ranks."""
    if func.namespace not in ("c10d", "_c10d_functional", "c10d_functional", "_dtensor"):
        return Communication()
    group: ProcessGroup | None = None
    for value in [*args, *kwargs.values()]:
        if isinstance(value, torch.ScriptObject):
            with suppress(RuntimeError, TypeError):  # the reduction is one too
                group = torch.distributed.ProcessGroup.unbox(value)
        elif isinstance(value, str) and value not in _REDUCTIONS:
            group = group_named(value)
    ranks = torch.distributed.get_process_group_ranks(group) if group is not None else [0]
    return Communication(len(ranks), stride_of(ranks), max((bytes_read(tensor) for tensor in tensors), default=0))


_REDUCTIONS = {"sum", "avg", "max", "min", "product"}

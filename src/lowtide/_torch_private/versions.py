"""Version counters: how often a tensor was written to, and what a kernel writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from lowtide._torch_private.modes import DisableTorchFunction
from lowtide._torch_private.nodes import without_graph
from lowtide._torch_private.subclasses import PLAIN

__all__ = [
    "WRITES_UNCOUNTED",
    "count_of_writes",
    "own_version",
    "version_of",
    "versions_of",
    "written_arguments",
]


own_version: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor was written to, as it counts itself; see :func:`version_of` for subclasses."""


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written to, counted where a subclass counts and where its plain tensor does.

    The result of a collective that may still be under way is waited for: until then others may count its writes. What
    was made in inference mode counts nothing, and is always at 0.
    """
    if tensor.is_inference():
        return 0
    version = tensor._version
    while type(tensor) not in PLAIN and hasattr(tensor, "__tensor_flatten__"):
        if hasattr(tensor, "trigger_wait"):
            tensor.trigger_wait()
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
        version += tensor._version
    return version


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """:func:`version_of` of each; ten times as fast where none of them is a subclass's."""
    if PLAIN.issuperset(map(type, tensors)):
        with suppress(RuntimeError):  # one of them was made in inference mode
            return list(map(own_version, tensors))
    return list(map(version_of, tensors))


def count_of_writes(tensor: Tensor) -> Tensor:
    """An empty tensor whose version is always that of ``tensor``: it shares the count and holds none of the bytes.

    Of some complex ones, which torch does not let be emptied, it holds them.
    """
    counter = without_graph(tensor)
    with DisableTorchFunction(), suppress(RuntimeError):
        counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


WRITES_UNCOUNTED = {
    "aten::cudnn_batch_norm": slice(3, 5),
    "aten::miopen_batch_norm": slice(3, 5),
    "aten::native_batch_norm": slice(3, 5),
    "aten::batch_norm_gather_stats_with_counts": slice(3, 5),
    "aten::batch_norm_gather_stats": slice(3, 5),
    "aten::batch_norm_update_stats": slice(1, 3),
}
"""Kernels that change their running statistics, which are these arguments: neither their schemas nor versions tell."""


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that a kernel writes into, by its schema or by :data:`WRITES_UNCOUNTED`."""
    arguments = func._schema.arguments
    given = [*args, *([None] * (len(arguments) - len(args)))]
    uncounted = WRITES_UNCOUNTED.get(func._schema.name)
    if uncounted is not None:
        values = {argument.name: value for argument, value in zip(arguments, given, strict=False)} | kwargs
        running = [argument.name for argument in arguments[uncounted]]
        written = [values[name] for name in running if values[name] is not None]
        return written if values.get("training", True) else []
    return [
        kwargs.get(argument.name, value)
        for argument, value in zip(arguments, given, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]

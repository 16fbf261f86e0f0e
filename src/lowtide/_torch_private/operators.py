"""Operators by name, kernels registered for a while, and nested arguments."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

from lowtide._torch_private.needed import needed_for

with needed_for("calling operators by name"):
    from torch._C import _jit_resolve_packet
    from torch.library import _scoped_library as scoped_library
    from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "forget_dispatch",
    "is_operator",
    "resolved_operator",
    "schema_of",
    "scoped_library",
    "tree_leaves",
    "tree_map",
]


schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""The schema of an operator."""


def forget_dispatch(*names: str) -> None:
    """Forget which kernels torch's Python dispatcher chose for these operators of ``aten``: others are there now.

    It is asked where a graph is compiled, and keeps its answers for good, also those of kernels that are gone.
    """
    for name in names:
        getattr(torch.ops.aten, name).default._dispatch_cache.clear()


def is_operator(func: Any) -> bool:
    """Whether a function that a dispatch mode sees has a schema: ``torch.cond`` and its like have none."""
    return hasattr(func, "_schema")


def resolved_operator(kind: str, args: list[Any], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """The operator that a name such as ``aten::add`` means with these arguments; AttributeError if there is none.

    Finding it once is more than convenience: for each overload that does not fit, torch writes the arguments out.
    """
    space, _, name = kind.partition("::")
    overload = _jit_resolve_packet(kind, *args, **kwargs)
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, space), name), overload or "default")
    return found

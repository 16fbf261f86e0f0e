"""Functional collectives: how they are recognised, named and waited for."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from lowtide._torch_private.needed import needed_for
from lowtide._torch_private.operators import tree_map

__all__ = [
    "COLLECTIVE_NAMESPACES",
    "exchange_rows",
    "finish_collective",
    "group_name_of",
    "group_named",
    "is_collective",
]


COLLECTIVE_NAMESPACES = frozenset(
    {"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem", "_dtensor"}
)
"""The namespaces of operators that ranks take part in together."""


def is_collective(function: Any) -> bool:
    """Whether a torch function is one of the functional collectives, which give back what is still under way."""
    if not str(getattr(function, "__module__", "")).startswith("torch._ops._c10d_functional"):
        return False
    return function.__name__.split(".")[0] not in ("wait_tensor", "wait_tensors", "_wrap_tensor_autograd")


def group_name_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The name of the group that a functional collective was called for: its last argument."""
    name = kwargs.get("group_name", args[-1] if args else None)
    return name if isinstance(name, str) else None


def finish_collective(result: Any) -> Any:
    """What a functional collective gave, waited for."""
    with needed_for("waiting for collectives"):
        wait = torch.ops._c10d_functional.wait_tensor
    return tree_map(lambda value: wait(value) if isinstance(value, Tensor) else value, result)


def group_named(name: str) -> Any:
    """The process group that a functional collective names."""
    with needed_for("finding a collective's process group"):
        resolve = importlib.import_module("torch.distributed.distributed_c10d")._resolve_process_group
    return resolve(name)


def exchange_rows(rows: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
    """Send each rank of a group some of our rows, and give back those that arrived, one rank's after another's.

    The functional collective makes the result itself, so that a mode that sees kernels knows what wrote it.
    """
    with needed_for("expert parallelism"):
        functional = importlib.import_module("torch.distributed._functional_collectives")
        exchange, wait = functional.all_to_all_single, functional.wait_tensor
    done: Tensor = wait(exchange(rows, received, sent, group))
    return done

"""Kernels over lists of tensors, for clipping."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide._torch_private.needed import needed_for

with needed_for("clipping gradients"):
    from torch import _foreach_mul_, _foreach_norm

__all__ = [
    "multiply_all",
    "norms_of",
]


def norms_of(tensors: list[Tensor]) -> list[Tensor]:
    """The norm of each tensor in float32, whatever its own type; few kernels for all of them."""
    norms: list[Tensor] = list(_foreach_norm(tensors, 2.0, torch.float32))
    return norms


def multiply_all(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place by a number on their device; few kernels for all of them."""
    _foreach_mul_(tensors, factor)

"""Random generators, and the accelerator that they may belong to."""

from __future__ import annotations

import torch

from lowtide._torch_private.needed import needed_for

with needed_for("random states"):
    from torch._C import _accelerator_getAccelerator as current_accelerator

__all__ = [
    "current_accelerator",
    "generator_key",
]


def generator_key(generator: torch.Generator) -> int:
    """The address of a random generator: a kernel's arguments are seen as other objects of the same."""
    address: int = generator._cdata  # type: ignore[attr-defined]
    return address

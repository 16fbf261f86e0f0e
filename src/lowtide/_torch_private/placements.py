"""DTensor placements: which part of a tensor this rank holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = [
    "held_indices",
]


def held_indices(tensor: Tensor) -> list[Tensor]:
    """For each dimension of a DTensor the places in the whole tensor that this rank holds, in its order.

    Placements are followed as DTensor itself splits, so that shards of shards come out right. A rank outside the mesh
    holds nothing.
    """
    whole: Any = tensor
    coordinate = whole.device_mesh.get_coordinate()
    held = [torch.arange(size if coordinate is not None else 0) for size in whole.shape]
    for axis, placement in enumerate(whole.placements):
        if coordinate is None or not hasattr(placement, "_split_tensor"):
            continue
        dimension = placement.dim % len(held)
        shape = [-1 if one == dimension else 1 for one in range(len(held))]
        parts, _ = placement._split_tensor(
            held[dimension].view(shape), whole.device_mesh.size(axis), with_padding=False, contiguous=False
        )
        held[dimension] = parts[coordinate[axis]].reshape(-1)
    return held

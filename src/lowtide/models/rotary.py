"""Rotary positions: the table, and turning queries and keys by it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from lowtide.models.kernels import rope
from lowtide.models.shape import DecoderShape, YarnShape

__all__ = ["RotaryEmbedding", "attention_scale", "rotary_table"]


def rotary_table(shape: DecoderShape, device: torch.device | None = None) -> Tensor:
    """Cosine and sine for every position, ``[2, positions, width of a head]``, in single precision.

    The angles are computed in double precision on the host, so that every device gets the same bits.
    """
    dim = shape.rotary_dim
    target = device if device is not None else torch.empty(()).device
    if target.type == "meta":
        return torch.empty(2, shape.max_position_embeddings, dim, device="meta")
    powers = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim
    frequencies = shape.rope_theta**-powers
    factor = 1.0
    if shape.yarn is not None:
        frequencies = _stretched(frequencies, shape.rope_theta, shape.yarn)
        factor = _mscale(shape.yarn.factor, shape.yarn.mscale) / _mscale(shape.yarn.factor, shape.yarn.mscale_all_dim)
    angles = torch.outer(torch.arange(shape.max_position_embeddings, dtype=torch.float64, device="cpu"), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return (torch.stack((angles.cos(), angles.sin())) * factor).to(torch.float32).to(target)


def attention_scale(shape: DecoderShape, width: int) -> float:
    """What attention's scores are multiplied by, for query heads of ``width``."""
    scale = 1 / math.sqrt(width)
    if shape.yarn is not None and shape.yarn.mscale_all_dim:
        scale *= _mscale(shape.yarn.factor, shape.yarn.mscale_all_dim) ** 2
    return scale


def _stretched(frequencies: Tensor, theta: float, yarn: YarnShape) -> Tensor:
    """Yarn: fast dimensions as they are, slow ones stretched, a ramp between them."""
    dim = 2 * len(frequencies)

    def dimension(turns: float) -> float:
        return dim * math.log(yarn.training_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension(yarn.beta_fast)), 0)
    high = min(math.ceil(dimension(yarn.beta_slow)), dim - 1)
    places = torch.arange(len(frequencies), dtype=torch.float64, device="cpu")
    ramp = ((places - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies / yarn.factor * ramp + frequencies * (1 - ramp)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


class RotaryEmbedding(nn.Module):
    """Turns queries and keys by their positions: one operator, whichever kernel does it."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.requested = shape.fused_rope

    def forward(self, queries: Tensor, keys: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """``queries`` and ``keys`` are ``[batch, sequence, heads, width]``.

        ``rotary`` is the table from position 0 on, or ``[2, batch, sequence, width]`` for positions of their own.
        """
        if rotary.dim() == 3:
            rotary = rotary[:, : queries.shape[1]]
        kernel = rope(self.requested, queries.device)
        return kernel(queries, keys, rotary[0].unsqueeze(-2), rotary[1].unsqueeze(-2))

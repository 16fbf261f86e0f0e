"""The dense feed-forward block: SwiGLU between two projections and a third."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from lowtide.models.kernels import swiglu

__all__ = ["FeedForward", "FusedSwiGLU"]


class FusedSwiGLU(nn.Module):
    """SwiGLU in one kernel, and so one operator."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return swiglu(gate.device)(gate, up)


class FeedForward(nn.Module):
    """``w2(silu(w1(x)) * w3(x))``."""

    def __init__(self, width: int, inner: int, *, fused: bool = False) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w3 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)
        self.swiglu = FusedSwiGLU() if fused else None

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.w1(hidden), self.w3(hidden)
        inner = functional.silu(gate) * up if self.swiglu is None else self.swiglu(gate, up)
        output: Tensor = self.w2(inner)
        return output

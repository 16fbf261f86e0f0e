"""The fused norm for the CPU, so that a run there can be compared with the device's.

The CPU takes RMSNorm apart and autograd then adds its gradients in another order. In float32 that
is a matter of the last bit; in bfloat16 a last bit can flip a rounding, and AdamW makes
a step of full size out of it.
"""

from __future__ import annotations

import torch


class FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True).add_(eps))
        ctx.save_for_backward(x, r, weight)
        return x.mul(r).mul(weight)

    @staticmethod
    def backward(ctx, g):
        x, r, weight = ctx.saved_tensors
        weighted = g.mul(weight)
        through_r = weighted.mul(x).sum(-1, keepdim=True)
        through_mean = through_r.mul(-0.5).mul(r.pow(3)).div(x.shape[-1])
        grad_x = weighted.mul(r).add(through_mean.mul(x.mul(2)))
        return grad_x, g.mul(x.mul(r)).sum(tuple(range(g.dim() - 1))), None


class RMSNorm(torch.nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32, "the residual stream stays in float32 under autocast"
        return FusedNorm.apply(x, self.weight, self.eps)

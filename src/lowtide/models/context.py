"""Context parallel: a rank has some of each sample's tokens, and in attention all tokens of some of the heads.

Ranks exchange heads for tokens before attention and tokens for heads after it (all-to-all, as DeepSpeed Ulysses has
it). So any attention kernel and any mask serves, every rank has the same work, and each head is computed as on one
rank. Torch's own context parallel replaces attention kernels that a CPU does not have.

``lowtide_even_group`` says that all ranks do the same in it: see [Note: where a recomputed layer stops] in
:mod:`lowtide.runtime.recompute`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowtide._torch_private.collectives import exchange_rows

__all__ = ["ToHeads", "ToTokens"]


class ToHeads(nn.Module):
    """From some tokens of all heads to all tokens of some heads, each ``[batch, tokens, heads, width]``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.lowtide_even_group = group

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys, values = (
            _Exchanged.apply(one, self.lowtide_even_group, _to_heads, _to_tokens) for one in (queries, keys, values)
        )
        return queries, keys, values


class ToTokens(nn.Module):
    """From all tokens of some heads to some tokens of all heads, ``[batch, tokens, heads x width]``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.lowtide_even_group = group

    def forward(self, mixed: Tensor) -> Tensor:
        returned: Tensor = _Exchanged.apply(mixed.unsqueeze(-2), self.lowtide_even_group, _to_tokens, _to_heads)
        return returned.flatten(-2)


Exchange = Callable[[Tensor, Any], Tensor]


class _Exchanged(torch.autograd.Function):
    """One exchange in forward, the other, which undoes it, in backward."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, group: Any, there: Exchange, back: Exchange) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(given, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(gradients[0], ctx.group), None, None, None


def _to_heads(given: Tensor, group: Any) -> Tensor:
    ranks = dist.get_world_size(group)
    batch, tokens, heads, width = given.shape
    sent = given.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4).reshape(ranks, -1)
    arrived = exchange_rows(sent, [1] * ranks, [1] * ranks, group)
    by_rank = arrived.view(ranks, batch, tokens, heads // ranks, width)
    return by_rank.transpose(0, 1).flatten(1, 2)


def _to_tokens(given: Tensor, group: Any) -> Tensor:
    ranks = dist.get_world_size(group)
    batch, tokens, heads, width = given.shape
    sent = given.unflatten(1, (ranks, -1)).transpose(0, 1).reshape(ranks, -1)
    arrived = exchange_rows(sent, [1] * ranks, [1] * ranks, group)
    by_rank = arrived.view(ranks, batch, tokens // ranks, heads, width)
    return by_rank.permute(1, 2, 0, 3, 4).flatten(2, 3)

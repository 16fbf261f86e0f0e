"""Cross-entropy of logits whose vocabulary is sharded over tensor-parallel ranks.

Each rank has the logits of its share of the vocabulary. What a token's loss needs of the others is two numbers: the
largest logit, and the sum of exponentials. So two all-reduces of one or two numbers a token replace gathering all
logits. For backward the logits stay in their own type; float32 copies are of some rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

__all__ = ["LEFT_OUT", "VocabularyShare", "share_of", "summed_cross_entropy"]

LEFT_OUT = -100
"""The target of a token that has no loss."""
ELEMENTS = 1 << 26
"""Logits that are float32 at a time: 256 MiB."""


@dataclass(frozen=True, slots=True)
class VocabularyShare:
    """The part of the vocabulary whose logits this rank has."""

    group: dist.ProcessGroup
    """The ranks that have the others."""
    first: int
    """Its first token."""
    size: int
    """How many tokens it has."""

    def inside(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Each target's index in the share, 0 where it is another rank's, and whether it is this rank's."""
        places = targets - self.first
        mine = (places >= 0) & (places < self.size)
        return places.where(mine, 0), mine

    def reduced(self, logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Of few rows, over all ranks: the logarithm of the sum of exponentials, and the targets' logits, of which
        ``chosen`` has this rank's and zeros; both ``[rows, 1]``."""
        largest = logits.amax(1, keepdim=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        summed = torch.cat(((logits - largest).exp_().sum(1, keepdim=True), chosen), 1)
        dist.all_reduce(summed, group=self.group)
        sums, chosen = summed.split(1, 1)
        return sums.log() + largest, chosen


def share_of(vocabulary: int, mesh: DeviceMesh) -> VocabularyShare:
    """This rank's share, as a DTensor shards: equal parts but for the last."""
    each = -(-vocabulary // mesh.size())
    first = min(vocabulary, mesh.get_local_rank() * each)
    return VocabularyShare(mesh.get_group(), first, min(each, vocabulary - first))


def summed_cross_entropy(logits: Tensor, targets: Tensor, share: VocabularyShare | None = None) -> Tensor:
    """The sum of the losses of all tokens, in float32; without a ``share`` as torch computes it.

    ``logits`` is ``[..., vocabulary]``, or this rank's share of it, ``targets`` ``[...]``; those of -100 are left out.
    """
    rows, flat = logits.flatten(0, -2), targets.flatten()
    if share is None:
        return functional.cross_entropy(rows.float(), flat, ignore_index=LEFT_OUT, reduction="sum")
    total: Tensor = _ShardedCrossEntropy.apply(rows, flat, share)
    return total


class _ShardedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, share: VocabularyShare) -> Tensor:
        exact = torch.promote_types(logits.dtype, torch.float32)
        places, mine = share.inside(targets)
        largest = logits.amax(1).to(exact)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=share.group)
        # One all-reduce for both: the sum of exponentials, and the target's logit, which one rank has.
        summed = torch.empty(2, len(logits), dtype=exact, device=logits.device)
        for rows in _pieces(logits):
            values = logits[rows].to(exact, copy=True).sub_(largest[rows].unsqueeze(1))
            summed[1, rows] = values.gather(1, places[rows].unsqueeze(1)).squeeze(1).where(mine[rows], 0)
            summed[0, rows] = values.exp_().sum(1)
            del values
        dist.all_reduce(summed, group=share.group)
        logarithms = summed[0].log()
        counted = targets != LEFT_OUT
        ctx.save_for_backward(logits, logarithms + largest, places, mine, counted)
        return (logarithms - summed[1]).where(counted, 0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits, normaliser, places, mine, counted = ctx.saved_tensors
        factors = gradients[0] * counted
        result = torch.empty_like(logits)
        for rows in _pieces(logits):
            # The gradient of a row's loss is its softmax, less one at the target.
            values = logits[rows].to(normaliser.dtype, copy=True).sub_(normaliser[rows].unsqueeze(1)).exp_()
            values.scatter_add_(1, places[rows].unsqueeze(1), -mine[rows].to(values.dtype).unsqueeze(1))
            result[rows] = values.mul_(factors[rows].unsqueeze(1))
            del values
        return result, None, None


def _pieces(logits: Tensor) -> Iterator[slice]:
    step = max(1, ELEMENTS // max(1, logits.shape[1]))
    for start in range(0, len(logits), step):
        yield slice(start, start + step)

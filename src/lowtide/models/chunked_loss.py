"""The head and the cross-entropy in one call that never holds all logits.

Logits are vocabulary times tokens, in float32 for the loss, and again for its gradient: often the peak of a step. Here
a few tokens at a time are projected, and their loss and their gradients computed at once, in forward, so that a chunk's
logits are gone before the next one's are made. What is left for backward is the gradient of the hidden states and of
the head's weights, to be multiplied by the gradient of the loss.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lowtide.errors import ModelError
from lowtide.models.sharded_loss import ELEMENTS, LEFT_OUT, VocabularyShare

__all__ = ["chunked_cross_entropy", "chunked_sum"]


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk: int | None = None,
    ignore_index: int = LEFT_OUT,
    reduction: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """``cross_entropy((hidden @ weight.T).float(), targets)`` in chunks of tokens; equal to it up to rounding.

    ``hidden`` is ``[..., width]``, ``weight`` ``[vocabulary, width]``, ``targets`` ``[...]``. Gradients of both are
    computed in forward, where they are needed; the weights' is summed in float32. Under autocast both are cast as a
    linear layer would cast them. A chunk has at most 2**26 logits unless ``chunk`` says how many tokens. It is for a
    whole vocabulary on each rank: a head sharded by tensor parallelism is refused.

    ``loss = chunked_cross_entropy(model.norm(x)[:, :-1], model.lm_head.weight, tokens[:, 1:])``
    """
    _check(hidden, weight, targets, chunk, reduction)
    total = chunked_sum(hidden, weight, targets, chunk=chunk, ignore_index=ignore_index)
    return total / (targets != ignore_index).sum() if reduction == "mean" else total


def chunked_sum(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    chunk: int | None = None,
    ignore_index: int = LEFT_OUT,
    share: VocabularyShare | None = None,
) -> Tensor:
    """The sum over all tokens, of plain tensors; with a ``share`` the weights are this rank's part of the vocabulary.

    Then the sum is the same on all ranks, and each one's gradient of the hidden states is its part of a sum.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    rows = hidden.flatten(0, -2) if hidden.dim() > 1 else hidden.unsqueeze(0)
    size = chunk or max(1, ELEMENTS // weight.shape[0])
    needed = tuple(torch.is_grad_enabled() and one.requires_grad for one in (hidden, weight))
    total: Tensor = _ChunkedCrossEntropy.apply(rows, weight, targets.flatten(), size, ignore_index, needed, share)
    return total


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The sum over all tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        size: int,
        ignore_index: int,
        needed: tuple[bool, bool],
        share: VocabularyShare | None,
    ) -> Tensor:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=exact, device=hidden.device)
        towards_hidden = torch.empty_like(hidden) if needed[0] else None
        towards_weight = torch.zeros_like(weight, dtype=exact) if needed[1] else None
        for start in range(0, hidden.shape[0], size):
            rows, goals = hidden[start : start + size], targets[start : start + size]
            counted = goals != ignore_index
            places, mine = (goals.where(counted, 0), counted) if share is None else share.inside(goals)
            places = places.unsqueeze(1)
            logits = (rows @ weight.t()).to(exact)
            chosen = logits.gather(1, places)
            if share is None:
                sums = logits.logsumexp(1, keepdim=True)
            else:
                sums, chosen = share.reduced(logits, chosen.where(mine.unsqueeze(1), 0))
            total += ((sums - chosen).squeeze(1) * counted).sum()
            if not any(needed):
                continue
            # The gradient of a row's loss is its softmax, less one at the target; logits become it where they are.
            gradient = logits.sub_(sums).exp_()
            gradient.scatter_add_(1, places, -mine.to(exact).unsqueeze(1))
            gradient = gradient.mul_(counted.unsqueeze(1)).to(hidden.dtype)
            del logits
            if towards_hidden is not None:
                torch.mm(gradient, weight, out=towards_hidden[start : start + size])
            if towards_weight is not None:
                if exact == hidden.dtype:
                    towards_weight.addmm_(gradient.t(), rows)
                else:
                    towards_weight += gradient.t() @ rows
            del gradient
        ctx.save_for_backward(towards_hidden, None if towards_weight is None else towards_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (gradient,) = gradients
        towards_hidden, towards_weight = ctx.saved_tensors
        return _scaled(towards_hidden, gradient), _scaled(towards_weight, gradient), None, None, None, None, None


def _scaled(tensor: Tensor | None, factor: Tensor) -> Tensor | None:
    """The tensor times a number that its own dtype may not hold exactly; some rows at a time: few are held twice."""
    if tensor is None or tensor.dtype == factor.dtype:
        return None if tensor is None else tensor * factor
    result = torch.empty_like(tensor)
    step = max(1, ELEMENTS // max(1, tensor.shape[1]))
    for start in range(0, tensor.shape[0], step):
        rows = slice(start, start + step)
        result[rows] = tensor[rows].to(factor.dtype).mul_(factor)
    return result


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int | None, reduction: str) -> None:
    if any(isinstance(one, DTensor) for one in (hidden, weight, targets)):
        raise ModelError(
            "chunked_cross_entropy was given a DTensor: it needs all of the vocabulary on each rank; use"
            " cross_entropy under loss_parallel, or leave the head out of tensor parallelism"
        )
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[-1] or hidden.shape[:-1] != targets.shape:
        raise ModelError(
            f"chunked_cross_entropy was given hidden states {list(hidden.shape)}, weights {list(weight.shape)} and"
            f" targets {list(targets.shape)}: expected [..., width], [vocabulary, width] and [...]"
        )
    if chunk is not None and chunk < 1:
        raise ModelError(f"a chunk has at least one token; found chunk={chunk}")
    if reduction not in ("mean", "sum"):
        raise ModelError(f"reduction is {reduction!r}: expected mean or sum")

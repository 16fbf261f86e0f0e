"""A vocabulary that is sharded over two ranks has the loss and the gradients of a whole one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from lowtide.models import sharded_loss
from lowtide.models.chunked_loss import chunked_sum
from lowtide.models.sharded_loss import share_of, summed_cross_entropy
from support.ranks import Ranks

TOKENS, WIDTH = 23, 16


def case(vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weights and targets, some of them left out; logits are far apart."""
    seed = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, WIDTH, generator=seed).to(dtype)
    weight = (torch.randn(vocabulary, WIDTH, generator=seed) * 3).to(dtype)
    targets = torch.randint(vocabulary, (TOKENS,), generator=seed)
    targets[::5] = sharded_loss.LEFT_OUT
    return hidden, weight, targets


def whole(vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The loss as torch computes it, and its gradients."""
    hidden, weight, targets = case(vocabulary, dtype)
    hidden.requires_grad_()
    weight.requires_grad_()
    loss = functional.cross_entropy((hidden @ weight.t()).float(), targets, reduction="sum")
    return loss.detach(), *torch.autograd.grad(loss * 0.125, (hidden, weight))


def sharded(vocabulary: int, dtype: torch.dtype, way: str) -> tuple[Any, ...]:
    """The same on this rank, which has its rows of the weights: its part of each gradient."""
    mesh = init_device_mesh("cpu", (2,))
    hidden, weight, targets = case(vocabulary, dtype)
    share = share_of(vocabulary, mesh)
    mine = weight[share.first : share.first + share.size].clone().requires_grad_()
    hidden.requires_grad_()
    elements = sharded_loss.ELEMENTS
    try:
        sharded_loss.ELEMENTS = 4 * vocabulary  # several pieces
        if way == "logits":
            loss = summed_cross_entropy((hidden @ mine.t()).unflatten(0, (1, -1)), targets.unsqueeze(0), share)
        else:
            loss = chunked_sum(hidden, mine, targets, chunk=4, share=share)
        return loss.detach(), *torch.autograd.grad(loss * 0.125, (hidden, mine))
    finally:
        sharded_loss.ELEMENTS = elements


@pytest.mark.parametrize("way", ["logits", "chunks"])
@pytest.mark.parametrize(
    ("vocabulary", "dtype", "near"), [(64, torch.float32, 1e-6), (37, torch.float32, 1e-6), (64, torch.bfloat16, 0.02)]
)
def test_loss_and_gradients_are_those_of_the_whole_vocabulary(
    way: str, vocabulary: int, dtype: torch.dtype, near: float, ranks: Ranks
) -> None:
    loss, towards_hidden, towards_weight = whole(vocabulary, dtype)
    (first, *parts), (second, *others) = ranks.run(sharded, vocabulary, dtype, way)
    assert torch.equal(first, second)
    assert float(first) == pytest.approx(float(loss), rel=1e-6)
    close: dict[str, Any] = {"rtol": near, "atol": near * float(towards_hidden.abs().max())}
    torch.testing.assert_close(parts[0] + others[0], towards_hidden, **close)
    torch.testing.assert_close(torch.cat((parts[1], others[1])), towards_weight, **close)

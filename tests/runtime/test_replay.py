"""What is replayed comes out the same: random numbers of the device, routing, and what the host knows of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from support.stacks import Body, gated, recompute, same, train
from tide.testing import fresh_tide  # noqa: F401


def with_dropout(layer: Any, x: Tensor) -> Tensor:
    return x + layer.down(functional.dropout(functional.silu(layer.up(layer.norm(x))), 0.3))


def with_routing(layer: Any, x: Tensor) -> Tensor:
    hidden = layer.up(layer.norm(x))
    scores = torch.softmax(hidden[:, :4], dim=-1)
    weights, chosen = torch.topk(scores, 1, dim=-1)
    sizes = torch.bincount(chosen.flatten(), minlength=4).tolist()  # the host waits, and knows the sizes
    order = torch.argsort(chosen.flatten(), stable=True)
    pieces = [torch.sin(piece * (place + 1)) for place, piece in enumerate(hidden[order].split(sizes))]
    back = torch.empty_like(hidden).index_put((order,), torch.cat(pieces))
    return x + layer.down(functional.dropout(back * weights, 0.1))


@pytest.mark.parametrize("names", [("silu", "dropout"), ("up", "silu", "dropout"), ("dropout",), ()])
def test_dropout_draws_the_same_numbers_again(names: tuple[str, ...]) -> None:
    """Also where all that dropout was given is itself rebuilt, so that no tensor of the device is held."""
    expected = train(with_dropout, None)
    assert same(expected.values, train(with_dropout, recompute(*names)).values)


@pytest.mark.parametrize("names", [("up", "softmax", "sin", "cat", "index_put", "mul"), ("softmax", "topk"), ()])
def test_routing_comes_out_the_same(names: tuple[str, ...]) -> None:
    expected = train(with_routing, None)
    found = train(with_routing, recompute(*names))
    assert same(expected.values, found.values)


@pytest.mark.parametrize("body", [with_dropout, with_routing, gated], ids=lambda body: body.__name__)
def test_a_replay_leaves_the_random_numbers_where_they_were(body: Body) -> None:
    def state(names: tuple[str, ...] | None) -> tuple[Tensor, Tensor]:
        train(body, recompute(*names) if names is not None else None)
        return torch.get_rng_state(), torch.rand(4, device="tide").cpu()

    expected = state(None)
    for names in ((), ("up",)):
        assert all(torch.equal(a, b) for a, b in zip(expected, state(names), strict=True))

"""The order in which autograd unpacks saved tensors is not specified: it may cost time, never a bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tide
from lowtide import LayerPolicy, Pattern, Policy, Recompute, Rule, Swap, apply
from lowtide.runtime.limits import Limits

LAYERS, WIDTH = 3, 64


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, given: Tensor) -> Tensor:
        return given + self.down(self.up(given).tanh() * self.gate(given).sigmoid())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, given: Tensor) -> Tensor:
        for layer in self.layers:
            given = layer(given)
        return given


def saved_by(output: Tensor) -> list[tuple[Any, str]]:
    """The nodes of a graph and the names under which each saves tensors, in an order that is always the same."""
    found, nodes, seen = [], [output.grad_fn], set()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        names = sorted(name for name in dir(node) if name.startswith("_raw_saved_"))
        found += [(node, name.replace("_raw", "")) for name in names]
        nodes += [following for following, _ in node.next_functions]
    return found


def unpacked(output: Tensor, seed: int | None) -> list[Tensor]:
    """What the nodes of a graph saved, unpacked in an order of our own."""
    saved = saved_by(output)
    order = list(range(len(saved)))
    if seed is not None:
        random.Random(seed).shuffle(order)
    values = {place: getattr(*saved[place]) for place in order}
    return [value.cpu() for place in range(len(saved)) if isinstance(value := values[place], Tensor)]


@pytest.mark.parametrize("prefetch", [1, 4, 50])
def test_saved_tensors_can_be_unpacked_in_any_order(prefetch: int) -> None:
    tide.reset()
    device = torch.device("tide")
    given = torch.randn(16, WIDTH).to(device)
    rules = (
        Rule(Pattern("tanh"), Swap(prefetch)),
        Rule(Pattern("mul"), Swap(prefetch)),
        Rule(Pattern("sigmoid"), Recompute()),
    )

    def step(model: nn.Module, seed: int | None) -> tuple[list[Tensor], list[Tensor]]:
        output = model(given)
        torch.accelerator.synchronize()
        values = unpacked(output, seed)
        output.square().sum().backward()  # unpacks them again, in autograd's order
        gradients = [one.grad.cpu() for one in model.parameters() if one.grad is not None]
        model.zero_grad()
        return values, gradients

    expected = step(Model().to(device), None)
    assert len(expected[0]) > 9 * LAYERS
    model = Model().to(device)
    handle = apply(model, Policy((LayerPolicy(rules=rules),) * LAYERS), limits=Limits(minimum_bytes=0))
    for seed in (None, *range(6)):  # the first step profiles the layers
        for found, wanted in zip(step(model, seed), expected, strict=True):
            assert len(found) == len(wanted)
            assert all(map(torch.equal, found, wanted))
    receipt = handle.receipt()
    assert sum(one.moved_bytes for one in receipt.settings) > 0, receipt
    handle.remove()

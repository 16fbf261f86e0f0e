"""A backward in two halves, as zero-bubble pipelines run it: recomputed and reloaded once, exact, and freed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint

import tide
from lowtide.policy import LayerPolicy, Pattern, Policy, Recompute, Rule, Swap
from lowtide.runtime.apply import apply
from lowtide.runtime.limits import Limits
from support.garbage import collect_garbage

LAYERS, WIDTH, ROWS = 3, 128, 512
TENSOR = ROWS * WIDTH * 4


class Block(nn.Module):
    """Three products that share an input, something between them, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.act, self.dropout = nn.SiLU(), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.dropout(self.down(self.act(self.gate(normed)) * torch.tanh(self.up(normed))))


class Halves(NamedTuple):
    """What one step of two halves leaves, and what the device held."""

    gradients: list[Tensor]
    between: int
    """Bytes between the halves."""
    after: int
    recomputes: int
    reloads: int


POLICIES = {
    "layer": LayerPolicy(default=Recompute()),
    "operators": LayerPolicy(rules=(Rule(Pattern("norm|act|tanh|mul"), Recompute()),)),
    "swap": LayerPolicy(default=Swap(1)),
    "layer, swapped input": LayerPolicy(default=Recompute(), boundary=Swap(1)),
    "mixed": LayerPolicy(rules=(Rule(Pattern("norm"), Swap(1)), Rule(Pattern("act|mul"), Recompute()))),
}


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    tide.configure(preset="h100")
    yield
    assert not tide.races()


def requested() -> int:
    """Bytes on the device once nothing is about to go."""
    collect_garbage()
    return int(torch.accelerator.memory_stats()["requested_bytes.all.current"])


def run(policy: LayerPolicy | None, *, weights: bool = True) -> Halves:
    """Two steps whose backward has two halves, or only the first of them; the second step is looked at."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(LAYERS))).to("tide")
    handle = apply(model, Policy((policy,) * LAYERS), limits=Limits(minimum_bytes=0)) if policy else None
    step(model, 0, weights)  # it learns
    found = step(model, 1, weights)
    if handle is None:
        return found
    recomputes = sum(one.recomputes for one in handle.receipt().operators)
    handle.remove()
    return found._replace(recomputes=recomputes)


def step(model: nn.Module, number: int, weights: bool) -> Halves:
    torch.manual_seed(1 + number)
    model.zero_grad()
    x = torch.randn(ROWS, WIDTH).to("tide").requires_grad_()
    gradient = torch.randn(ROWS, WIDTH).to("tide")
    before = requested()
    with tide.record() as timeline:
        output = model(x)
        inputs, groups = stage_backward_input([output], [gradient], [x], model.parameters())
        del output
        between = requested() - before - TENSOR  # but for the gradient of the input
        if weights:
            stage_backward_weight(model.parameters(), groups)
        del groups
        after = requested() - before - TENSOR
        torch.accelerator.synchronize()
    gradients = [one.cpu() for one in (inputs[0], *(one.grad for one in model.parameters())) if one is not None]
    reloads = sum(span["name"] == "copy host to device" for span in timeline.spans)
    return Halves(gradients, between, after, 0, reloads)


@pytest.fixture(scope="module")
def kept() -> Halves:
    tide.configure(preset="h100")
    return run(None)


@pytest.mark.parametrize("name", POLICIES)
def test_halves_are_exact_and_nothing_is_made_again_for_the_second(name: str, kept: Halves) -> None:
    both, first = run(POLICIES[name]), run(POLICIES[name], weights=False)
    assert all(torch.equal(one, other) for one, other in zip(both.gradients, kept.gradients, strict=True))
    assert (both.recomputes, both.reloads) == (first.recomputes, first.reloads)
    assert both.recomputes + both.reloads > 0
    assert both.between < kept.between  # only what products need is held between the halves
    assert (both.after, first.after) == (kept.after, 0)


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_graph_that_is_kept_for_another_reason_holds_what_it_did(create_graph: bool) -> None:
    model = nn.Sequential(*(Block() for _ in range(LAYERS))).to("tide")

    def held(forward: Callable[[Tensor], Tensor]) -> int:
        x = torch.randn(ROWS, WIDTH).to("tide").requires_grad_()
        before = requested()
        loss = forward(x).sum()
        # A penalty on the gradient of the input leaves the parameters out too, and is no half.
        inputs = [x] if create_graph else [x, *model.parameters()]
        gradients = torch.autograd.grad(loss, inputs, retain_graph=True, create_graph=create_graph)
        assert len(gradients) == len(inputs)
        return requested() - before

    def by_torch(x: Tensor) -> Tensor:
        for block in model:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    held(by_torch)  # the first time leaves something with the parameters
    expected = held(by_torch)
    with apply(model, Policy((LayerPolicy(default=Recompute()),) * LAYERS)):
        assert held(model) == expected

"""A graph that is dropped instead of being run is freed, also where the layer diverged from its profile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tide  # noqa: F401
from lowtide.policy import LayerPolicy, Pattern, Policy, Recompute, Rule, Swap
from lowtide.runtime.apply import apply
from lowtide.runtime.limits import Limits
from support.garbage import collect_garbage


class Diverging(nn.Module):
    """Saves its own outputs, at other places in evaluation than in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.training:
            hidden = self.drop(hidden)
        return x + torch.tanh(self.second(torch.softmax(hidden, -1)))


@pytest.mark.parametrize(
    "decision", [LayerPolicy(Swap(1)), LayerPolicy(rules=(Rule(Pattern(".*", "path"), Recompute()),))], ids=str
)
def test_a_diverged_graph_that_is_dropped_is_freed(decision: LayerPolicy) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), *(Diverging() for _ in range(3))).to("tide")
    handle = apply(model, Policy((decision,) * 3, origin="solver"), limits=Limits(minimum_bytes=1))
    x = torch.randn(64, 64).to("tide")
    held: list[int] = []
    for _ in range(4):
        model.train()
        model(x).sum().backward()
        model.zero_grad()
        model.eval()
        model(x)
        collect_garbage()
        held.append(torch.accelerator.memory_allocated())
    assert held[1] == held[2] == held[3]
    handle.remove()

"""A layer that has a selective checkpoint of the user's own inside is exact, however torch shows us what that saves."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lowtide import LayerPolicy, Pattern, Policy, Recompute, Rule, Swap, apply

WIDTH, LAYERS = 64, 3
KNOWN = "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
RESPECT = [
    pytest.param(
        {"respect_saved_tensors_hooks": value} if value is not None else {},
        id=str(value),
        marks=pytest.mark.skipif(value is not None and not KNOWN, reason="this torch shows hooks nothing of it"),
    )
    for value in (None, False, True)
]


def keep_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operator in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class Layer(nn.Module):
    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self.up, self.down, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.settings = settings

    def inside(self, given: Tensor) -> Tensor:
        return self.down(functional.silu(self.up(given))).tanh()

    def forward(self, given: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, keep_products)
        inner = checkpoint(self.inside, given, use_reentrant=False, context_fn=contexts, **self.settings)
        return given + self.out(inner).sigmoid()


class Model(nn.Module):
    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(settings) for _ in range(LAYERS))

    def forward(self, given: Tensor) -> Tensor:
        for layer in self.layers:
            given = layer(given)
        return given


def train(model: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        loss = model(torch.randn(8, WIDTH)).square().sum()
        loss.backward()
        found += [loss.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]
        model.zero_grad()
    return found


@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")
@pytest.mark.parametrize("settings", RESPECT)
@pytest.mark.parametrize(
    "rules",
    [
        (Rule(Pattern("up"), Recompute()), Rule(Pattern("out"), Recompute()), Rule(Pattern("sigmoid"), Recompute())),
        (Rule(Pattern("up"), Swap(1)), Rule(Pattern("down"), Swap(2)), Rule(Pattern("out"), Swap(1))),
    ],
    ids=["recompute", "swap"],
)
def test_operators_inside_a_selective_checkpoint_can_be_decided(
    rules: tuple[Rule, ...], settings: dict[str, Any]
) -> None:
    plain, model = train(Model({})), Model(settings)
    handle = apply(model, Policy((LayerPolicy(rules=rules),) * LAYERS), allow_unmatched=True)
    assert all(map(torch.equal, plain, train(model)))
    handle.remove()

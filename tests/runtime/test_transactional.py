"""An ``apply`` that raises has changed nothing, and neither has one that was removed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.errors import LowtideError, ModelError, PolicyError, UnmatchedError
from lowtide.policy import Communication, LayerPolicy, Pattern, Policy, Recompute, Rule, Swap
from lowtide.runtime.apply import Handle, apply
from lowtide.runtime.limits import Limits


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def everything(model: nn.Module) -> list[Any]:
    """All that a module is: its class, its attributes and what is in each of its dictionaries, hooks included."""
    return [
        (
            name,
            type(module),
            {key: dict(value) if isinstance(value, dict) else value for key, value in vars(module).items()},
        )
        for name, module in model.named_modules()
    ]


def kinds_of() -> Any:
    """What a handle has profiled of such a model."""
    model = Model()
    handle = apply(model, Policy((LayerPolicy(Swap(2)),) * 3), limits=Limits(minimum_bytes=1))
    model(torch.randn(2, 8)).sum().backward()
    handle.remove()
    return handle.profiles


def compiled(model: Model, place: int) -> Model:
    model.layers[place].up.compile(backend="eager")
    return model


WHOLE = LayerPolicy(Recompute(), boundary=Swap(2))
SINGLE = LayerPolicy(rules=(Rule(Pattern("up"), Recompute()),))
NAMELESS = LayerPolicy(rules=(Rule(Pattern("no_such_operator"), Recompute()),))

REFUSED: dict[str, tuple[type[LowtideError], Callable[[], Model], Callable[[Model], Handle]]] = {
    "another number of layers": (PolicyError, Model, lambda model: apply(model, Policy((WHOLE,) * 2))),
    "no such module of layers": (ModelError, Model, lambda model: apply(model, Policy((WHOLE,) * 3), layers="blocks")),
    "single operators of a layer with a compiled part": (
        PolicyError,
        lambda: compiled(Model(), 2),
        lambda model: apply(
            model, Policy((WHOLE, WHOLE, SINGLE), communication=Communication(reshard_after_forward=True))
        ),
    ),
    "a pattern that matches nothing in what is known": (
        UnmatchedError,
        Model,
        lambda model: apply(
            model,
            Policy((WHOLE, SINGLE, NAMELESS), communication=Communication(reshard_after_forward=True)),
            profiles=kinds_of(),
        ),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_policy_leaves_the_model_as_it_was(what: str) -> None:
    error, make, refused = REFUSED[what]
    model = make()
    before = everything(model)
    with pytest.raises(error):
        refused(model)
    assert everything(model) == before


def test_a_warning_that_is_an_error_leaves_the_model_as_it_was() -> None:
    model = Model()
    before = everything(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="no layer is recomputed"):
            apply(model, Policy((SINGLE,) * 3, communication=Communication(reissue_collectives=False)))
    assert everything(model) == before


@pytest.mark.parametrize("policy", [WHOLE, SINGLE, LayerPolicy(Swap(3))], ids=["whole", "single", "swap"])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_removed_policy_leaves_the_model_as_it_was(policy: LayerPolicy, steps: int) -> None:
    model = Model()
    before = everything(model)
    handle = apply(
        model,
        Policy((policy,) * 3, communication=Communication(reshard_after_forward=True)),
        limits=Limits(minimum_bytes=1),
    )
    with warnings.catch_warnings(action="ignore"):
        for _ in range(steps):
            model(torch.randn(2, 8)).sum().backward()
    handle.remove()
    model.zero_grad()
    assert everything(model) == before

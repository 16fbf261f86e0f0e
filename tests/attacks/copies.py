"""Copies of a model, files of it, and what tools read off it."""

from __future__ import annotations

import copy
import inspect
import io
from typing import Any

import torch
from torch import Tensor, nn

from attacks.harness import BOTH, Found, Side, attack
from attacks.parts import WIDTH, Block, Net, stack, without_dropout
from attacks.surroundings import has_own_forward
from attacks.treatments import ADAPTED, APPLIED, EVERY

__all__: list[str] = []


def trained_with(side: Side, model: nn.Module, look: Any, steps: int = 8) -> None:
    """Train, and look at the model between a forward and its backward and after each step."""
    model.to(side.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run = side.start(model, optimizer)
    for step in range(steps):

        def one(step: int = step) -> None:
            optimizer.zero_grad()
            loss = model(side.batch(step, 8, 16, WIDTH)).square().mean()
            if step % 3 == 1:
                look(f"within {step}", model)
            loss.backward()
            optimizer.step()
            side.record(f"loss {step}", loss)
            side.record_gradients(step, model)

        run.step(one)
        look(f"after {step}", model)


@attack("copy.deepcopy(model) at any moment, and the copy is trained", treatments=EVERY, devices=BOTH)
def deep_copy(side: Side) -> None:
    def look(label: str, model: nn.Module) -> None:
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
            side.record(f"zeros {label}", other(side.batch(1, 2, 16, WIDTH)))
        other(side.batch(2, 2, 16, WIDTH)).sum().backward()
        side.record_gradients(f"copy {label}", other)

    trained_with(side, without_dropout(Net()), look)


@attack("torch.save(model) and torch.load at any moment", treatments=EVERY, devices=BOTH)
def saved_and_loaded(side: Side) -> None:
    def look(label: str, model: nn.Module) -> None:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
        with torch.no_grad():
            side.record(f"loaded {label}", other(side.batch(1, 2, 16, WIDTH)))
        for name, module in other.named_modules():
            if has_own_forward(module):
                raise Found("left_behind", f"the file holds a wrapped forward of {name}")

    trained_with(side, without_dropout(Net()), look)


@attack("copy.copy of a layer runs on the original's parameters", treatments=("operators", "layers", "swap", *ADAPTED))
def shallow_copy(side: Side) -> None:
    def look(label: str, model: nn.Module) -> None:
        layer: Any = model.get_submodule("layers.0")
        other = copy.copy(layer)
        other._parameters = dict(other._parameters)
        other._modules = {name: copy.copy(module) for name, module in other._modules.items()}
        for module in other._modules.values():
            module._parameters = {
                name: nn.Parameter(torch.zeros_like(parameter)) for name, parameter in module._parameters.items()
            }
        x = side.batch(1, 2, 16, WIDTH)
        with torch.no_grad():
            side.record(f"copy {label}", other(x))

    trained_with(side, without_dropout(Net()), look)


@attack("state_dict has the same names, in the same order, at any moment", treatments=EVERY)
def state_dict_names(side: Side) -> None:
    names: list[str] = []

    def look(label: str, model: nn.Module) -> None:
        found = list(model.state_dict())
        names[:] = names or found
        if found != names:
            raise Found("left_behind", f"other names {label}: {sorted(set(found) ^ set(names))[:3]}")

    trained_with(side, Net(), look)
    side.record("names", float(len(names)))


class Documented(Net):
    """Has arguments that a trainer reads off its signature."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        return super().forward(x)


@attack("the signature of forward: transformers' Trainer drops columns that it does not name", treatments=EVERY)
def signature(side: Side) -> None:
    def look(label: str, model: nn.Module) -> None:
        found = list(inspect.signature(model.forward).parameters)
        if found != ["x", "attention_mask", "labels"]:
            raise Found("silently_wrong", f"forward has the arguments {found} {label}")
        layer = model.get_submodule("layers.0")
        if list(inspect.signature(layer.forward).parameters) != ["x"]:
            raise Found("silently_wrong", f"a layer's forward is {inspect.signature(layer.forward)} {label}")

    trained_with(side, Documented(), look)


@attack("inspect.getsource, isinstance and repr see the user's model", treatments=APPLIED)
def identity(side: Side) -> None:
    def look(label: str, model: nn.Module) -> None:
        side.record(f"length {label}", float(len(repr(model))))
        if not all(type(layer) is Block for layer in model.get_submodule("layers")):  # type: ignore[attr-defined]
            raise Found("left_behind", "a layer is of another class")

    trained_with(side, Net(), look)


@attack(
    "parameters are iterated, counted and moved to the host and back between steps", treatments=APPLIED, devices=BOTH
)
def moved_between(side: Side) -> None:
    def look(label: str, model: nn.Module) -> None:
        if label.startswith("after"):
            model.to("cpu")
            side.record(f"sum {label}", sum(float(parameter.sum()) for parameter in model.parameters()))
            model.to(side.device)

    model = without_dropout(stack()).to(side.device)
    run = side.start(model)
    for step in range(4):

        def one(step: int = step) -> None:
            loss = model(side.batch(step, 8, 16, WIDTH)).square().mean()
            loss.backward()
            side.record(f"loss {step}", loss)
            side.record_gradients(step, model)
            model.zero_grad()

        run.step(one)
        look(f"after {step}", model)

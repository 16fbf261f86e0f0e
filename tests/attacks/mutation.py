"""Tensors, modules and settings that are changed while they are still needed."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from attacks.harness import BOTH, Side, attack, train
from attacks.parts import WIDTH, Block, Net, stack
from attacks.treatments import ADAPTED, APPLIED, EVERY, TREATMENTS
from lowtide.runtime.limits import Limits

__all__: list[str] = []


class Positioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(WIDTH) / 6)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(functional.gelu(self.first(x + self.position)))


class Straight(nn.Module):
    """Layers that are given the batch itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Positioned() for _ in range(3)), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


WRITTEN = ("modified by an inplace operation",)
"""What torch says where a whole layer's input was written to before the layer is recomputed: in docs/runtime.md."""


@attack(
    "the next batch is copied into the static input buffer before backward",
    treatments=EVERY,
    devices=BOTH,
    documented=WRITTEN,
)
def static_input(side: Side) -> None:
    static = torch.zeros(8, WIDTH, device=side.device)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        static.copy_(x)
        value = model(static).square().mean()
        static.normal_()
        return value

    train(side, Straight(), loss=loss)


class InPlace(Straight):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.head.weight.mean()
        for layer in self.layers:
            y = layer(x)
            x.add_(y)
        return self.head(x)


@attack("the residual is added in place to a layer's input", treatments=EVERY, devices=BOTH, documented=WRITTEN)
def residual_in_place(side: Side) -> None:
    train(side, InPlace())


@attack("activations and residuals in place: ReLU(inplace=True), mul_, add_", treatments=EVERY, devices=BOTH)
def activations_in_place(side: Side) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.act = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            y = functional.dropout(self.act(self.first(x)), 0.2)
            return self.second(y).mul_(0.5).add_(x)

    train(side, stack(Layer))


@attack("children and parameters are replaced between steps", treatments=APPLIED, devices=BOTH)
def replaced_modules(side: Side) -> None:
    def replace(model: nn.Module, step: int) -> None:
        for layer in model.modules():
            if isinstance(layer, Block) and step == 3:
                layer.up = copy.deepcopy(layer.up)
                layer.down.weight = nn.Parameter(layer.down.weight.detach() * 1.01)
            if isinstance(layer, Block) and step == 5:
                layer.dropout = nn.Identity()

    train(side, stack(), before=replace, batch=lambda step: side.batch(step, 8, 16, WIDTH))


@attack("model.to(dtype) between steps", treatments=APPLIED, devices=BOTH)
def changed_dtype(side: Side) -> None:
    model = stack().to(side.device)
    run = side.start(model)
    for step in range(6):
        dtype = torch.float64 if step in (2, 3) else torch.float32
        model.to(dtype)

        def one(step: int = step, dtype: torch.dtype = dtype) -> None:
            loss = model(side.batch(step, 8, 16, WIDTH).to(dtype)).square().mean()
            loss.backward()
            side.record(f"loss {step}", loss)
            side.record_gradients(step, model)
            model.zero_grad()

        run.step(one)


@attack("a discriminator is frozen in forward and unfrozen before backward", treatments=EVERY, devices=BOTH)
def toggled_gradients(side: Side) -> None:
    turn = [0]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        turn[0] += 1
        layers: nn.Module = model.layers  # type: ignore[assignment]
        layers.requires_grad_(turn[0] % 2 == 0)
        value = model(x).square().mean()
        layers.requires_grad_(True)
        return value

    train(side, Net(), loss=loss, batch=lambda step: side.batch(step, 8, 16, WIDTH))


@attack(
    "weights are streamed through p.data by hooks and are NaN outside their layer", treatments=APPLIED, devices=BOTH
)
def streamed_weights(side: Side) -> None:
    model = stack().to(side.device)
    store = {parameter: parameter.data.clone() for layer in list(model)[1:-1] for parameter in layer.parameters()}

    def load(module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters():
            parameter.data = store[parameter].clone()

    def unload(module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters():
            parameter.data = torch.full_like(store[parameter], float("nan"))

    for layer in list(model)[1:-1]:
        layer.register_forward_pre_hook(load)
        layer.register_forward_hook(unload)
        layer.register_full_backward_pre_hook(load)
        layer.register_full_backward_hook(unload)
    run = side.start(model)
    for step in range(4):

        def one(step: int = step) -> None:
            loss = model(side.batch(step, 8, 16, WIDTH).requires_grad_()).square().mean()
            loss.backward()
            side.record(f"loss {step}", loss)
            side.record_gradients(step, model)
            model.zero_grad()

        run.step(one)


@attack("a handle is removed and another applied between forward and backward", treatments=APPLIED, devices=BOTH)
def handed_over(side: Side) -> None:
    model = stack().to(side.device)
    run = side.start(model)

    def forward(step: int) -> Tensor:
        torch.manual_seed(step)
        loss: Tensor = model(side.batch(step, 8, 16, WIDTH)).square().mean()
        return loss

    def gradients(label: str, loss: Tensor) -> None:
        model.zero_grad()
        loss.backward()
        side.record_gradients(label, model)

    run.step(lambda: gradients("first", forward(1)))
    for number, following in enumerate(("operators", "swap", "layers", "boundary")):
        earlier = forward(2)
        if side.handles:
            side.handles.pop().remove()
            policy = TREATMENTS[following].policy(3)
            side.handles.append(lowtide.apply(model, policy, limits=Limits(minimum_bytes=1)))
        later = forward(3)
        gradients(f"earlier {number}", earlier)
        gradients(f"later {number}", later)
    model.zero_grad()


@attack("load_state_dict of an older checkpoint in the middle of training", treatments=EVERY)
def reloaded_states(side: Side) -> None:
    model = stack().to(side.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run = side.start(model, optimizer)
    saved: Any = None
    for step in range(10):

        def one(step: int = step) -> None:
            optimizer.zero_grad()
            loss = model(side.batch(step, 8, 16, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            side.record(f"loss {step}", loss)

        run.step(one)
        if step == 3:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if step == 6:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])


@attack("a parameter is written in place between forward and backward: torch's own error, and no other",
        treatments=(*APPLIED, *ADAPTED))  # fmt: skip
def written_parameter(side: Side) -> None:
    """torch raises here; a replay with the new weight would be silently another."""
    model = stack().to(side.device)
    run = side.start(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(4):

        def one(step: int = step) -> None:
            loss = model(side.batch(step, 8, 16, WIDTH)).square().mean()
            with torch.no_grad():
                model[2].down.weight.mul_(1.01)  # type: ignore[union-attr]
            raised = 0
            try:
                loss.backward()
            except Exception:
                raised = 1
            side.record(f"raised {step}", raised)
            model.zero_grad()

        run.step(one)

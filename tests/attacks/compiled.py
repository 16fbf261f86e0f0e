"""Compiled and scripted functions and layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks.harness import Attack, Side, attack, train
from attacks.parts import WIDTH, Block, Scaled, around, calls, compiling, stack
from attacks.treatments import ADAPTED, APPLIED

__all__: list[str] = []

BACKENDS = ("eager", "aot_eager")


def compiled_function(backend: str) -> Attack:
    def program(side: Side) -> None:
        function = torch.compile(lambda x: functional.gelu(x) * x + torch.tanh(x), backend=backend)
        with compiling():
            train(side, calls(function))

    return attack(
        f"a function compiled with {backend} is called in a layer", name=f"compiled_function_{backend}",
        treatments=("operators", "layers", "swap", "boundary", *ADAPTED),
    )(program)  # fmt: skip


def compiled_leaf(backend: str) -> Attack:
    def program(side: Side) -> None:
        function = torch.compile(lambda x, y: functional.gelu(x) * y, backend=backend)

        class Leaf(Scaled):
            def forward(self, x: Tensor) -> Tensor:
                result: Tensor = function(x, x * self.weight)
                return result

        with compiling():
            train(side, around(Leaf))

    return attack(
        f"a function compiled with {backend} is called in a leaf", name=f"compiled_leaf_{backend}",
        treatments=("operators", "layers", "swap", "boundary", *ADAPTED),
    )(program)  # fmt: skip


def compiled_layers(backend: str) -> Attack:
    def program(side: Side) -> None:
        model = stack(lambda: Block(dropout=0.0))
        for layer in list(model)[1:-1]:
            layer.compile(backend=backend)
        with compiling():
            train(side, model, batch=lambda step: side.batch(step, 8, 16, WIDTH), steps=4)

    return attack(
        f"layers compiled with {backend} in place", name=f"compiled_layers_{backend}",
        treatments=("layers", "swap", "operators"),
    )(program)  # fmt: skip


FUNCTIONS = tuple(compiled_function(backend) for backend in BACKENDS)
LEAVES = tuple(compiled_leaf(backend) for backend in BACKENDS)
LAYERS = tuple(compiled_layers(backend) for backend in BACKENDS)


@attack("the whole model is compiled after a Policy was applied", treatments=("layers", "swap", "operators"))
def compiled_model(side: Side) -> None:
    model = stack(lambda: Block(dropout=0.0)).to(side.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run = side.start(model, optimizer)
    with compiling():
        faster = torch.compile(model, backend="eager")
        for step in range(4):

            def one(step: int = step) -> None:
                optimizer.zero_grad()
                loss = faster(side.batch(step, 8, 16, WIDTH)).square().mean()
                loss.backward()
                optimizer.step()
                side.record(f"loss {step}", loss)
                side.record_gradients(step, model)

            run.step(one)


@torch.jit.script
def bias_gelu(bias: Tensor, y: Tensor) -> Tensor:
    x = bias + y
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


class ScriptedLeaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return bias_gelu(self.bias, x)


@attack("a scripted function, as Megatron's fused bias and GELU", treatments=APPLIED)
def scripted(side: Side) -> None:
    bias_gelu(torch.zeros(WIDTH), torch.zeros(4, WIDTH))  # the profiling executor settles
    train(side, around(ScriptedLeaf))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


@attack("layers that were traced by torch.jit", treatments=("swap", "operators"))
def traced(side: Side) -> None:
    layers = [torch.jit.trace(Plain(), torch.randn(8, WIDTH)) for _ in range(3)]
    made = nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers, nn.Linear(WIDTH, 1))
    train(side, made)

"""A stack of small layers around one function, and steps of training with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowtide.policy import LayerPolicy, Pattern, Policy, Recompute, Rule, Swap
from lowtide.runtime.apply import Handle, apply
from lowtide.runtime.ledger import Line
from lowtide.runtime.limits import Limits

__all__ = ["Body", "Layer", "Stack", "Trained", "gated", "lines", "recompute", "same", "step", "swap", "train"]

Body: TypeAlias = Callable[[Any, Tensor], Tensor]
ROWS, WIDTH = 32, 32


class Layer(nn.Module):
    """A layer around a function."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("table", torch.linspace(0.5, 1.5, 2 * WIDTH))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


class Stack(nn.Module):
    """Layers in a row."""

    def __init__(self, body: Body, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(body) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def gated(layer: Any, x: Tensor) -> Tensor:
    """The operators are norm, up, silu, sigmoid, mul, down and add."""
    hidden = layer.up(layer.norm(x))
    return x + layer.down(functional.silu(hidden) * hidden.sigmoid())


def swap(*names: str, prefetch: int = 2, tier: Literal["host", "disk"] = "host") -> LayerPolicy:
    """Swap these operators, or all of a layer."""
    decision = Swap(prefetch, tier)
    if not names:
        return LayerPolicy(decision, boundary=decision)
    return LayerPolicy(rules=tuple(Rule(Pattern(name), decision) for name in names))


def recompute(*names: str) -> LayerPolicy:
    """Recompute these operators, or the whole layer."""
    if not names:
        return LayerPolicy(Recompute())
    return LayerPolicy(rules=tuple(Rule(Pattern(name), Recompute()) for name in names))


@dataclass
class Trained:
    """A model after a few steps, and the loss and gradients of each."""

    model: Stack
    handle: Handle | None
    values: list[Tensor]

    @property
    def attached(self) -> Handle:
        assert self.handle is not None
        return self.handle


def train(
    body: Body,
    policy: LayerPolicy | None,
    *,
    device: str = "tide",
    limits: Limits | None = None,
    steps: int = 3,
    count: int = 3,
    backward: Callable[[Tensor], None] = Tensor.backward,
    around: Callable[[int], Any] | None = None,
) -> Trained:
    """Train from the same start, with or without a Policy; ``around`` gives what each step runs in."""
    torch.manual_seed(0)
    model = Stack(body, count).to(device)
    limits = limits or Limits(minimum_bytes=1)
    handle = apply(model, Policy((policy,) * count, origin="solver"), limits=limits) if policy is not None else None
    batches = [torch.randn(ROWS, WIDTH).to(device) for _ in range(steps)]
    trained = Trained(model, handle, [])
    for number, batch in enumerate(batches):
        torch.manual_seed(100 + number)
        if around is None:
            trained.values += step(model, batch, backward)
        else:
            with around(number):
                trained.values += step(model, batch, backward)
    return trained


def step(model: Stack, batch: Tensor, backward: Callable[[Tensor], None]) -> list[Tensor]:
    """One step of training: the loss and every gradient."""
    model.zero_grad()
    loss = model(batch).square().mean()
    backward(loss)
    values = [loss.detach(), *(one.grad for one in model.parameters() if one.grad is not None)]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.1)
    return [value.cpu() for value in values]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    """Whether all values are bitwise equal."""
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def lines(handle: Handle, operator: str = "") -> list[Line]:
    """The ledger's lines, of one operator or of all."""
    return [line for line in handle.ledger.lines.values() if operator in ("", line.operator)]

"""Parts of which the attacks build their models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn import functional

__all__ = [
    "WIDTH",
    "Around",
    "Block",
    "Calls",
    "Net",
    "Scaled",
    "around",
    "calls",
    "compiling",
    "stack",
    "without_dropout",
]

WIDTH = 32


class Block(nn.Module):
    """A norm, two linears with an activation between, dropout, and a residual."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Layers between two linears."""

    def __init__(self, layer: Callable[[], nn.Module] = Block, layers: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(layer() for _ in range(layers))
        self.last = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class Scaled(nn.Module):
    """A leaf with a weight; what it does beside that is its subclass's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.prepare()

    def prepare(self) -> None:
        """Make what else it holds."""


class Around(nn.Module):
    """A layer with some module between two linears, and a residual."""

    def __init__(self, leaf: nn.Module) -> None:
        super().__init__()
        self.first, self.leaf, self.second = nn.Linear(WIDTH, WIDTH), leaf, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.leaf(self.first(x)))


class Calls(nn.Module):
    """A layer that calls a function between two linears."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.function(self.first(x)))


def around(leaf: Callable[[], nn.Module]) -> nn.Sequential:
    """Three layers around such a leaf."""
    return stack(lambda: Around(leaf()))


def calls(function: Callable[[Tensor], Tensor]) -> nn.Sequential:
    """Three layers that call a function."""
    return stack(lambda: Calls(function))


def stack(layer: Callable[[], nn.Module] = Block, layers: int = 3) -> nn.Sequential:
    """Layers between a linear and a head."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(layer() for _ in range(layers)), nn.Linear(WIDTH, 1))


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@contextmanager
def compiling() -> Iterator[None]:
    """Nothing compiled before, and nothing afterwards: what was compiled holds tensors."""
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()

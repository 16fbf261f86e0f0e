"""State that a replay cannot see: counters, mutable arguments, attributes that change before backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks.harness import BOTH, Side, attack, train
from attacks.parts import WIDTH, Scaled, around, stack
from attacks.treatments import ADAPTED, EVERY, RECOMPUTED

__all__: list[str] = []

REPLAYED = (*RECOMPUTED, *ADAPTED)


class ListCounter(Scaled):
    def prepare(self) -> None:
        self.calls = [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        return functional.gelu(x * self.weight) * (1 + 0.1 * self.calls[0])


@attack("a leaf counts its calls in a list: the replay counted again", treatments=REPLAYED)
def counter_in_list(side: Side) -> None:
    train(side, around(ListCounter))


class Counter(Scaled):
    def prepare(self) -> None:
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return functional.gelu(x * self.weight) * (1 + 0.1 * self.calls)


@attack("a leaf counts its calls in an attribute", treatments=REPLAYED)
def counter_attribute(side: Side) -> None:
    train(side, around(Counter))


@attack("a leaf counts its calls in a global", treatments=REPLAYED)
def counter_global(side: Side) -> None:
    calls = [0]

    class Leaf(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            calls[0] += 1
            return functional.gelu(x * self.weight) * (1 + 0.1 * calls[0])

    train(side, around(Leaf))


class PlainMean(Scaled):
    def prepare(self) -> None:
        self.mean = torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean = 0.9 * self.mean.to(x) + 0.1 * x.mean(0)
        return functional.gelu(x * self.weight - self.mean)


@attack("a running mean that is a plain attribute, no buffer", treatments=REPLAYED)
def mean_attribute(side: Side) -> None:
    train(side, around(PlainMean))


@dataclass
class State:
    x: Tensor


class StateLeaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)

    def forward(self, state: State) -> State:
        state.x = functional.gelu(state.x @ self.weight)
        return state


class StateLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.leaf, self.second = nn.Linear(WIDTH, WIDTH), StateLeaf(), nn.Linear(WIDTH, WIDTH)

    def forward(self, state: State) -> State:
        residual = state.x
        state.x = self.first(residual)
        state = self.leaf(state)
        state.x = residual + self.second(state.x)
        return state


class StateModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(StateLayer() for _ in range(3)), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        state = State(x)
        for layer in self.layers:
            state = layer(state)
        return self.head(state.x)


@attack("a mutable dataclass goes through all layers, which write into it: wrong gradients", treatments=EVERY)
def mutable_dataclass(side: Side) -> None:
    train(side, StateModel())


class DictLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        values["x"] = values["x"] + self.second(torch.tanh(self.first(values["x"])))
        return values


class DictModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(DictLayer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        values = {"x": self.first(x)}
        for layer in self.layers:
            values = layer(values)
        return self.head(values["x"])


@attack("layers write into a dict they are given; square, so that no shape gives it away", treatments=EVERY)
def mutable_dict(side: Side) -> None:
    train(side, DictModel(), batch=lambda step: side.batch(step, WIDTH, WIDTH))


class ListLayer(nn.Module):
    """Appends to the list it is given, as a dense block does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, outputs: list[Tensor]) -> Tensor:
        return functional.gelu(self.linear(torch.stack(outputs).mean(0)))


class ListModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(ListLayer() for _ in range(4)), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        outputs = [x]
        for layer in self.layers:
            outputs.append(layer(outputs))
        return self.head(torch.stack(outputs).sum(0))


@attack(
    "DenseNet: a layer's list argument is appended to afterwards, and the replay saw the longer one", treatments=EVERY
)
def list_argument(side: Side) -> None:
    train(side, ListModel())


# Attributes that change between a forward and its backward.


def forwards_then_backwards(
    side: Side, leaf: Callable[[], nn.Module], change: Callable[[Any, float], None]
) -> None:  # fmt: skip
    """Two forwards with another attribute each, then both backwards."""
    model = around(leaf).to(side.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run = side.start(model, optimizer)
    for step in range(8):

        def one(step: int = step) -> None:
            optimizer.zero_grad()
            losses = []
            for part in range(2):
                for layer in list(model)[1:-1]:
                    change(layer.leaf, 0.1 * (step + part))
                losses.append(model(side.batch(step, 8, WIDTH)).square().mean())
            for loss in reversed(losses):
                loss.backward()
            for part, loss in enumerate(losses):
                side.record(f"loss {step}.{part}", loss)
            side.record_gradients(step, model)
            optimizer.step()

        run.step(one)


class Shifted(Scaled):
    def prepare(self) -> None:
        self.shift: Any = 0.0

    def value(self) -> Any:
        return self.shift

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x * self.weight + self.value())


@attack("a number that is an attribute is set between forward and backward", treatments=REPLAYED)
def attribute_number(side: Side) -> None:
    forwards_then_backwards(side, Shifted, lambda leaf, value: setattr(leaf, "shift", value))


class ShiftedByTensor(Shifted):
    def prepare(self) -> None:
        self.shift = torch.zeros(1)


@attack("a tensor attribute is filled between forward and backward", treatments=REPLAYED)
def attribute_tensor(side: Side) -> None:
    forwards_then_backwards(side, ShiftedByTensor, lambda leaf, value: leaf.shift.fill_(value))


class ShiftedByList(Shifted):
    def prepare(self) -> None:
        self.shift = [0.0]

    def value(self) -> Any:
        return self.shift[0]


@attack("an element of a list attribute is set between forward and backward", treatments=REPLAYED)
def attribute_list(side: Side) -> None:
    forwards_then_backwards(side, ShiftedByList, lambda leaf, value: leaf.shift.__setitem__(0, value))


class ShiftedByNamespace(Shifted):
    def prepare(self) -> None:
        self.shift = SimpleNamespace(value=0.0)

    def value(self) -> Any:
        return self.shift.value


@attack("a field of a config object is set between forward and backward", treatments=REPLAYED)
def attribute_config(side: Side) -> None:
    forwards_then_backwards(side, ShiftedByNamespace, lambda leaf, value: setattr(leaf.shift, "value", value))


class ShiftedByDict(Shifted):
    def prepare(self) -> None:
        self.shift = {"value": torch.zeros(1)}

    def value(self) -> Any:
        return self.shift["value"]


@attack("a tensor in a dict attribute is replaced between forward and backward", treatments=REPLAYED)
def attribute_dict(side: Side) -> None:
    def change(leaf: Any, value: float) -> None:
        leaf.shift["value"] = torch.full((1,), value)

    forwards_then_backwards(side, ShiftedByDict, change)


class Clamped(nn.Module):
    """Writes through .data, which no version counter sees."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.softmax, self.second = nn.Linear(WIDTH, WIDTH), nn.Softmax(-1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.softmax(self.first(x))
        shares.data.clamp_(min=0.03)
        return x + self.second(shares)


@attack("p.data.clamp_() after softmax: the replay gave the value before it", treatments=EVERY, devices=BOTH)
def data_clamp(side: Side) -> None:
    train(side, stack(Clamped))


@attack("auxiliary losses that layers append to a list of the program: a puzzling error", treatments=EVERY)
def losses_in_list(side: Side) -> None:
    collected: list[Tensor] = []

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.randn(WIDTH, 4) / 6)
            self.value = nn.Parameter(torch.randn(4, WIDTH) / 3)

        def forward(self, x: Tensor) -> Tensor:
            shares = (x @ self.gate).softmax(-1)
            collected.append((shares.mean(0) ** 2).sum())
            return functional.gelu(shares @ self.value)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        collected.clear()
        value = model(x).square().mean()
        total = value + sum(collected)
        collected.clear()
        return total

    train(side, around(Router), loss=loss)

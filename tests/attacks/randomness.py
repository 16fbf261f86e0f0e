"""Random numbers that a replay would draw a second time."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional

from attacks.harness import BOTH, TIDE, Side, attack, train
from attacks.parts import WIDTH, Block, Net, Scaled, around, calls, stack
from attacks.treatments import ADAPTED, EVERY, RECOMPUTED

__all__: list[str] = []

REPLAYED = (*RECOMPUTED, *ADAPTED)


class PythonRandom(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x * self.weight) * random.uniform(0.5, 1.5)


@attack("a leaf that draws from python's random: wrong gradients when it was recomputed", treatments=REPLAYED)
def python_random(side: Side) -> None:
    train(side, around(PythonRandom))


class NumpyRandom(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x * self.weight) * float(numpy.random.rand())


@attack("a leaf that draws from numpy's global generator: wrong gradients when recomputed", treatments=REPLAYED)
def numpy_random(side: Side) -> None:
    train(side, around(NumpyRandom))


class NumpyGenerator(Scaled):
    def prepare(self) -> None:
        self.generator = numpy.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x * self.weight) * float(self.generator.random())


@attack("a leaf with a numpy Generator of its own", treatments=REPLAYED)
def numpy_generator(side: Side) -> None:
    train(side, around(NumpyGenerator))


class AttributeGenerator(Scaled):
    def prepare(self) -> None:
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(WIDTH, generator=self.generator).to(x.device)
        return functional.gelu(x * self.weight + noise)


@attack(
    "a torch.Generator as an attribute: adapt's first steps recomputed whole layers, and diverged", treatments=EVERY
)
def generator_attribute(side: Side) -> None:
    train(side, around(AttributeGenerator))


class GeneratorsInDict(Scaled):
    def prepare(self) -> None:
        self.generators = {"noise": torch.Generator().manual_seed(3)}

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(WIDTH, generator=self.generators["noise"]).to(x.device)
        return functional.gelu(x * self.weight + noise)


@attack("torch.Generators in a dict of the module: wrong gradients when recomputed", treatments=REPLAYED)
def generators_in_dict(side: Side) -> None:
    train(side, around(GeneratorsInDict))


@attack("a torch.Generator that is a global of the program", treatments=REPLAYED)
def global_generator(side: Side) -> None:
    generator = torch.Generator().manual_seed(7)

    def noisy(x: Tensor) -> Tensor:
        return functional.gelu(x + torch.randn(WIDTH, generator=generator).to(x.device))

    class Leaf(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            return noisy(x * self.weight)

    train(side, around(Leaf))


@attack("a device generator of the layer's own", treatments=EVERY, devices=TIDE)
def device_generator(side: Side) -> None:
    generator = torch.Generator(side.device).manual_seed(5)

    def noisy(x: Tensor) -> Tensor:
        return functional.silu(x + torch.randn(x.shape, generator=generator, device=x.device))

    train(side, calls(noisy))


class DropsOnDevice(Scaled):
    """Is given a host tensor and drops on the device."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(functional.gelu(x.to(self.weight.device) * self.weight), 0.3)


class HandsToHost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.leaf, self.second = nn.Linear(WIDTH, WIDTH), DropsOnDevice(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.leaf(self.first(x).cpu()))


@attack("a leaf is given host tensors and drops on the device: its device's generator was not kept", devices=TIDE,
        treatments=REPLAYED)  # fmt: skip
def host_inputs_device_dropout(side: Side) -> None:
    train(side, stack(HandsToHost))


class LayerOnHost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(dropout=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x.to(self.block.norm.weight.device)).cpu()


class NetOnHost(Net):
    def __init__(self) -> None:
        super().__init__(LayerOnHost)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x.to(self.last.weight.device))


@attack("layers are given host tensors and drop on the device", devices=TIDE, treatments=REPLAYED)
def host_layers_device_dropout(side: Side) -> None:
    train(side, NetOnHost(), batch=lambda step: side.batch(step, 8, WIDTH).cpu())


@attack("dropout, rrelu and Gumbel noise in one layer, no seed between the steps", treatments=EVERY, devices=BOTH)
def many_draws(side: Side) -> None:
    def noisy(x: Tensor) -> Tensor:
        x = functional.dropout(x, 0.2)
        x = functional.rrelu(x, training=True)
        return x * functional.gumbel_softmax(x)

    train(side, calls(noisy))


@attack("Reformer draws a seed inside its layers", treatments=("operators", "layers", "swap"))
def layer_that_seeds(side: Side) -> None:
    class Seeds(Scaled):
        def forward(self, x: Tensor) -> Tensor:
            drawn = int(torch.randint(0, 10**6, (1,)))
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(drawn)
                noise = torch.randn(WIDTH).to(x.device)
            return functional.gelu(x * self.weight + noise)

    train(side, around(Seeds))


@attack("the step draws noise from its own generator and is repeated after OOM: documented, yet silent", devices=TIDE,
        treatments=("adapt steps",))  # fmt: skip
def step_with_own_generator(side: Side) -> None:
    model = Net().to(side.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = side.start(model, optimizer)
    generator = torch.Generator(side.device).manual_seed(9)
    for step in range(12):

        def one(step: int = step) -> None:
            if step in (8, 10):
                run.fail_allocation(20 + step)
            optimizer.zero_grad()
            x = side.batch(step, 64, 16, WIDTH)
            noise = torch.randn(x.shape, generator=generator, device=x.device)
            loss = (model(x + noise) - noise).square().mean()
            loss.backward()
            run.heal()
            optimizer.step()
            side.record(f"loss {step}", loss)

        run.step(one)


class CountsForwards(Net):
    """Anneals by how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return super().forward(x) * min(1.0, self.forwards / 20)


class RunningMean(Net):
    """A running mean that is no buffer."""

    mean: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        now = y.detach().mean()
        self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        return y - self.mean


def disturbed(side: Side, model: nn.Module) -> None:
    """A step of Adam in some of whose steps an allocation fails."""
    model.to(side.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = side.start(model, optimizer)
    for step in range(13):

        def one(step: int = step) -> None:
            if step in (8, 10, 11):
                run.fail_allocation(12 + 9 * (step % 7))
            optimizer.zero_grad()
            loss = model(side.batch(step, 64, 16, WIDTH)).square().mean()
            loss.backward()
            run.heal()
            optimizer.step()
            side.record(f"loss {step}", loss)

        run.step(one)


@attack("the model counts its forwards and a step is repeated after OOM", devices=TIDE, treatments=("adapt steps",))
def repeated_step_counts(side: Side) -> None:
    disturbed(side, CountsForwards())


@attack("a running mean that is no buffer, and a step is repeated after OOM", devices=TIDE, treatments=("adapt steps",))
def repeated_step_running_mean(side: Side) -> None:
    disturbed(side, RunningMean())


@attack("a model whose layers hold a Generator, and a step is repeated after OOM", devices=TIDE,
        treatments=("adapt steps",))  # fmt: skip
def repeated_step_module_generator(side: Side) -> None:
    class Noisy(Block):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(1)

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.randn(x.shape[-1], generator=self.generator).to(x.device)
            return super().forward(x * (1 + 0.1 * noise))

    disturbed(side, Net(Noisy))


@attack("nothing special, and allocations fail in four steps", devices=TIDE, treatments=ADAPTED)
def repeated_step(side: Side) -> None:
    disturbed(side, Net())

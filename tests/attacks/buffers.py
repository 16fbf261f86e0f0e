"""Buffers that a forward writes, which a replay must not write again."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from attacks.harness import BOTH, Side, attack, train
from attacks.parts import WIDTH, Around, Net, Scaled, around, stack
from attacks.treatments import ADAPTED, APPLIED, EVERY, RECOMPUTED

__all__: list[str] = []

REPLAYED = (*RECOMPUTED, *ADAPTED)


def normed() -> nn.Module:
    return Around(nn.Sequential(nn.BatchNorm1d(WIDTH), nn.GELU()))


@attack("nn.BatchNorm in every layer", treatments=EVERY, devices=BOTH)
def batch_norm(side: Side) -> None:
    train(side, stack(normed))


class FunctionalNorm(nn.Module):
    """As timm's BatchNormAct2d: the functional form, and statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        normed = functional.batch_norm(self.first(x), self.mean, self.variance, training=True)
        return x + self.second(functional.gelu(normed))


@attack("F.batch_norm outside nn.BatchNorm (EfficientNet, RegNet): statistics were updated twice", treatments=EVERY,
        devices=BOTH)  # fmt: skip
def functional_batch_norm(side: Side) -> None:
    train(side, stack(FunctionalNorm))


class NormLeaf(Scaled):
    def prepare(self) -> None:
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(functional.batch_norm(x, self.mean, self.variance, self.weight, None, training=True))


@attack("a leaf with F.batch_norm and no counter of batches", treatments=REPLAYED)
def functional_batch_norm_leaf(side: Side) -> None:
    train(side, around(NormLeaf))


@attack("F.instance_norm with running statistics", treatments=REPLAYED)
def instance_norm(side: Side) -> None:
    class Leaf(Scaled):
        def prepare(self) -> None:
            self.norm = nn.InstanceNorm1d(8, track_running_stats=True)

        def forward(self, x: Tensor) -> Tensor:
            return functional.gelu(self.norm(x) * self.weight)

    train(side, around(Leaf), batch=lambda step: side.batch(step, 4, 8, WIDTH))


@attack("batch norms that are frozen for two steps: statistics were then updated twice", treatments=REPLAYED,
        devices=BOTH)  # fmt: skip
def batch_norm_unfrozen_later(side: Side) -> None:
    def unfreeze(model: nn.Module, step: int) -> None:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.train(step >= 2)

    train(side, stack(normed), before=unfreeze)


def quantized() -> nn.Module:
    fake = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
    fake.disable_observer()
    fake.disable_fake_quant()
    return Around(nn.Sequential(fake, nn.GELU()))


@attack("QAT whose observers are enabled in step 3 and its fake quantization in step 4", treatments=REPLAYED)
def quantization_observers(side: Side) -> None:
    def enable(model: nn.Module, step: int) -> None:
        for module in model.modules():
            if isinstance(module, FakeQuantize) and step == 2:
                module.enable_observer()
            if isinstance(module, FakeQuantize) and step == 3:
                module.enable_fake_quant()

    train(side, stack(quantized), before=enable)


class MovingAverage(nn.Module):
    """A moving average that is a buffer; it begins when it is switched on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.on = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.on:
            with torch.no_grad():
                self.average.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
        return x + self.second(functional.gelu(hidden - self.average.clone()))


@attack("a moving average that starts in step 3: written twice by whole layers", treatments=REPLAYED, devices=BOTH)
def moving_average_later(side: Side) -> None:
    def switch(model: nn.Module, step: int) -> None:
        for module in model.modules():
            if isinstance(module, MovingAverage):
                module.on = step >= 2

    train(side, stack(MovingAverage), before=switch)


class ReplacesBuffer(nn.Module):
    """Assigns a new tensor to its buffer in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.scale = 0.9 * self.scale + 0.1 * hidden.detach().abs().mean(0)
        return x + self.second(functional.gelu(hidden * self.scale))


@attack("a buffer that every forward replaces", treatments=EVERY, devices=BOTH)
def replaced_buffer(side: Side) -> None:
    train(side, stack(ReplacesBuffer))


def two_forwards(side: Side, model: nn.Module, *, reverse: bool, change: str = "") -> None:
    """Two forwards before their backwards; between them a buffer may be annealed."""
    model.to(side.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run = side.start(model, optimizer)
    for step in range(8):

        def one(step: int = step) -> None:
            optimizer.zero_grad()
            losses = []
            for part in range(2):
                for module in model.modules():
                    if change and hasattr(module, change):
                        getattr(module, change).fill_(0.1 * (step + part))
                losses.append(model(side.batch(10 * step + part, 8, WIDTH)).square().mean())
            for loss in reversed(losses) if reverse else losses:
                loss.backward()
            side.record_gradients(step, model)
            for part, loss in enumerate(losses):
                side.record(f"loss {step}.{part}", loss)
            for name, buffer in model.named_buffers():
                side.record(f"buffer {step} {name}", buffer)
            optimizer.step()

        run.step(one)


@attack("a replaced buffer, two forwards, then their backwards in order", treatments=REPLAYED)
def replaced_buffer_two_forwards(side: Side) -> None:
    two_forwards(side, stack(ReplacesBuffer), reverse=False)


@attack("a replaced buffer, two forwards and reversed backwards: whole layers mixed them up", treatments=REPLAYED)
def replaced_buffer_reversed(side: Side) -> None:
    two_forwards(side, stack(ReplacesBuffer), reverse=True)


@attack("batch norms, two forwards and reversed backwards", treatments=REPLAYED, devices=BOTH)
def batch_norm_reversed(side: Side) -> None:
    two_forwards(side, stack(normed), reverse=True)


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("temperature", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(functional.gelu(self.first(x) + self.temperature))


@attack("a buffer annealed between two forwards, both backwards afterwards", treatments=APPLIED)
def annealed_buffer(side: Side) -> None:
    two_forwards(side, stack(Annealed), reverse=False, change="temperature")


class Checkpointed(Net):
    """The user's own checkpoint around every layer."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__(normed)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.last(x)


@attack("the user's checkpoint around layers with batch norm", treatments=EVERY, devices=BOTH)
def checkpointed_batch_norm(side: Side) -> None:
    train(side, Checkpointed(reentrant=False))


@attack("the user's reentrant checkpoint around layers with batch norm", treatments=EVERY, devices=BOTH)
def reentrant_batch_norm(side: Side) -> None:
    train(side, Checkpointed(reentrant=True))


class Normalised(nn.Module):
    """Spectral and weight norm, as parametrizations and as hooks."""

    def __init__(self) -> None:
        super().__init__()
        new, old = nn.utils.parametrizations, nn.utils
        self.first = new.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.second = new.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.third = old.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.fourth = old.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.second(functional.gelu(self.first(x))))
        return x + self.fourth(functional.silu(self.third(hidden)))


@attack("spectral and weight norm, new and old: power iterations write buffers", treatments=APPLIED)
def spectral_norm(side: Side) -> None:
    train(side, stack(Normalised))


class Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(50, WIDTH, max_norm=1.0), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.arange(8, device=x.device) * 3 % 50
        return functional.gelu(self.linear(x + self.table(rows)))


@attack("nn.Embedding(max_norm=...) writes its own weight in forward", treatments=APPLIED)
def embedding_max_norm(side: Side) -> None:
    train(side, stack(Renormed), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=5.0))


class InferenceBuffer(Scaled):
    def prepare(self) -> None:
        with torch.inference_mode():
            self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x * self.weight + self.shift)


@attack("a leaf's buffer made in inference mode: RebuildError, though keeping it is possible", treatments=EVERY)
def inference_buffer_leaf(side: Side) -> None:
    train(side, around(InferenceBuffer))


@attack("a cache filled in inference mode as a buffer of the model: run.step raised", treatments=ADAPTED, devices=BOTH)
def inference_buffer_model(side: Side) -> None:
    model = Net().to(side.device)
    with torch.inference_mode():
        model.register_buffer("cache", torch.zeros(WIDTH, device=side.device))
    model.register_forward_hook(lambda module, args, output: output + module.cache)
    train(side, model, batch=lambda step: side.batch(step, 4, 16, WIDTH))

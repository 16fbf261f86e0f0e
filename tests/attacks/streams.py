"""Layers on several streams, and a device that works on its own."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

from attacks.harness import BOTH, TIDE, Attack, Side, attack, train
from attacks.outcome import CAPACITY
from attacks.parts import WIDTH, Net, stack, without_dropout
from attacks.treatments import APPLIED, EVERY

__all__: list[str] = []


class OnStreams(Net):
    """Every layer on one of two streams."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        self.streams = [torch.Stream("tide") for _ in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        main = torch.accelerator.current_stream()
        for place, layer in enumerate(self.layers):
            stream = self.streams[place % 2]
            stream.wait_stream(main)
            x.record_stream(stream)
            with stream:
                y = layer(x)
            main.wait_stream(stream)
            y.record_stream(main)
            x = y
        return self.last(x)


class Branches(OnStreams):
    """Two branches at once."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        main = torch.accelerator.current_stream()
        results = []
        for branch, stream in enumerate(self.streams):
            stream.wait_stream(main)
            x.record_stream(stream)
            with stream:
                results.append(self.layers[2 * branch + 1](self.layers[2 * branch](x)))
        for stream, result in zip(self.streams, results, strict=True):
            main.wait_stream(stream)
            result.record_stream(main)
        return self.last(results[0] * results[1])


def on_streams(kind: type[Net], mode: str) -> Attack:
    def program(side: Side) -> None:
        import tide

        tide.configure(mode=mode, capacity=CAPACITY)
        train(side, kind(), batch=lambda step: side.batch(step, 32, 16, WIDTH), steps=4)

    name = f"{kind.__name__.lower()}_{mode}"
    return attack(f"layers on side streams, {mode} device", name=name, treatments=APPLIED, devices=TIDE)(program)


ON_STREAMS = tuple(on_streams(kind, mode) for kind in (OnStreams, Branches) for mode in ("virtual", "async"))


@attack("a device whose kernels run later than they are issued", treatments=EVERY, devices=TIDE)
def asynchronous(side: Side) -> None:
    import tide

    tide.configure(mode="async", capacity=CAPACITY)
    train(side, stack(), batch=lambda step: side.batch(step, 32, 16, WIDTH))


@attack("two threads train one model at once", treatments=("operators", "swap", "swap late", "disk"),
        devices=BOTH)  # fmt: skip
def threads(side: Side) -> None:
    model: nn.Module = without_dropout(stack()).to(side.device)
    side.start(model)
    parameters = list(model.parameters())
    model(side.batch(0, 8, 16, WIDTH)).square().mean().backward()
    model.zero_grad()
    found: dict[tuple[int, int], tuple[Tensor, ...]] = {}
    errors: list[Exception] = []

    def work(number: int) -> None:
        try:
            for turn in range(8):
                loss = model(side.batch(number, 8, 16, WIDTH)).square().mean()
                found[number, turn] = torch.autograd.grad(loss, parameters)
        except Exception as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for error in errors:
        raise error
    for (number, turn), gradients in sorted(found.items()):
        for place, gradient in enumerate(gradients):
            side.record(f"thread {number} turn {turn} gradient {place}", gradient)

"""Graphs that are not simply used once, from the loss: in parts, twice, interleaved, accumulated."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from attacks.harness import BOTH, TIDE, Side, attack, train
from attacks.loops import sentences
from attacks.parts import WIDTH, Net, stack, without_dropout
from attacks.treatments import ADAPTED, APPLIED, EVERY

__all__: list[str] = []


@attack("two towers of one model, and a reference without gradients", treatments=EVERY, devices=BOTH)
def contrastive(side: Side) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        one, other = model(x).mean(1), model(x.flip(1)).mean(1)
        with torch.no_grad():
            reference = model(x).mean(1)
        scores = functional.normalize(one) @ functional.normalize(other).t()
        target = torch.arange(len(x), device=x.device)
        return functional.cross_entropy(scores * 5, target) + (one - reference).square().mean()

    train(side, Net(), loss=loss, batch=sentences(side))


@attack("backward in parts: inputs=, retain_graph, and the gradient of a middle activation", treatments=APPLIED,
        devices=BOTH)  # fmt: skip
def partial_backward(side: Side) -> None:
    model = Net().to(side.device)
    parameters = list(model.parameters())
    run = side.start(model)
    for step in range(4):

        def one(step: int = step) -> None:
            x = side.batch(step, 8, 16, WIDTH).requires_grad_()
            middle: list[Tensor] = []
            hook = model.layers[1].register_forward_hook(lambda module, args, output: middle.append(output))
            y = model(x)
            hook.remove()
            first, second = y.square().mean(), y.abs().mean()
            side.record(f"middle {step}", torch.autograd.grad(first, middle, retain_graph=True)[0])
            side.record(f"input {step}", torch.autograd.grad(second, x, retain_graph=True)[0])
            torch.autograd.backward([first, second], inputs=parameters[-4:], retain_graph=True)
            torch.autograd.backward([first, second], inputs=parameters[:-4])
            side.record_gradients(step, model)
            model.zero_grad()

        run.step(one)


@attack("two generators that interleave the forwards and backwards of one model", treatments=APPLIED, devices=BOTH)
def interleaved_generators(side: Side) -> None:
    model = Net().to(side.device)
    side.start(model)

    def training(tag: str) -> Iterator[None]:
        for step in range(5):
            torch.manual_seed(step)
            loss = model(side.batch(step, 8, 16, WIDTH)).square().mean()
            side.record(f"{tag} loss {step}", loss)
            yield
            for place, gradient in enumerate(torch.autograd.grad(loss, list(model.parameters()))):
                side.record(f"{tag} gradient {step} {place}", gradient)
            yield

    first, second = training("first"), training("second")
    for turn in range(11):
        next(first, None)
        for _ in range(3 if turn % 2 else 0):
            next(second, None)


@attack("WGAN's gradient penalty: backward through backward", treatments=EVERY, devices=BOTH)
def gradient_penalty(side: Side) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = model(x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.square().mean() + (gradient.flatten(1).norm(dim=1) - 1).square().mean()

    train(side, Net(), loss=loss, batch=sentences(side))


# Not on tide, where torch's forward mode breaks down without lowtide.
@attack("forward-mode AD over the layers, then backward of the tangent: other bits while profiling", treatments=EVERY)
def forward_mode(side: Side) -> None:
    from torch.autograd import forward_ad

    model = without_dropout(stack()).to(side.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run = side.start(model, optimizer)
    for step in range(8):

        def one(step: int = step) -> None:
            optimizer.zero_grad()
            x = side.batch(step, 8, 16, WIDTH)
            with forward_ad.dual_level():
                y = model(forward_ad.make_dual(x, torch.ones_like(x))).square().mean()
                tangent = forward_ad.unpack_dual(y).tangent
                tangent.backward()
            side.record(f"tangent {step}", tangent)
            side.record_gradients(step, model)
            optimizer.step()

        run.step(one)


# Gradients that are accumulated over several steps.


def accumulated(side: Side, add: Callable[[nn.Module, Tensor], None], fails: int) -> None:
    model = without_dropout(Net()).to(side.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    run = side.start(model, optimizer)
    for step in range(12):

        def one(step: int = step) -> None:
            if step in (9, 11):
                run.fail_allocation(fails)
            loss = model(side.batch(step, 64, 16, WIDTH)).square().mean()
            add(model, loss)
            run.heal()
            side.record(f"loss {step}", loss)
            side.record_gradients(step, model)

        run.step(one)
        if step % 2:
            optimizer.step()
            model.zero_grad()


def out_of_place(model: nn.Module, loss: Tensor) -> None:
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


@attack("gradients accumulated out of place over two steps, and the second is repeated: the first's were lost",
        devices=TIDE, treatments=("adapt steps",))  # fmt: skip
def accumulated_out_of_place(side: Side) -> None:
    accumulated(side, out_of_place, 62)


@attack("gradients accumulated in place over two steps, and the second is repeated", devices=TIDE,
        treatments=("adapt steps",))  # fmt: skip
def accumulated_in_place(side: Side) -> None:
    accumulated(side, lambda model, loss: loss.backward(), 40)


@attack("backward(create_graph=True) over two steps, and the second is repeated: its gradients were lost", devices=TIDE,
        treatments=("adapt steps",))  # fmt: skip
def accumulated_with_graph(side: Side) -> None:
    accumulated(side, lambda model, loss: loss.backward(create_graph=True), 90)
    for model in side.models:
        model.zero_grad()  # a gradient with a graph is a cycle


@attack("micro-batches of several sizes in a step, accumulated", treatments=EVERY, devices=BOTH)
def micro_batches(side: Side) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        for size in (5, 3):
            model(x[:size]).square().mean().backward()
        value: Tensor = model(x[2:]).square().mean()
        return value

    train(side, Net(), loss=loss, batch=sentences(side))


@attack("a random mix of sizes, accumulation, evaluation and skipped steps", treatments=ADAPTED, devices=BOTH)
def random_loop(side: Side) -> None:
    draw = random.Random(3)
    model = Net().to(side.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = side.start(model, optimizer)
    for step in range(16):
        sizes = [draw.choice((2, 5, 8)) for _ in range(draw.randint(1, 3))]
        skipped, evaluates = draw.random() < 0.2, draw.random() < 0.3

        def one(step: int = step, sizes: Any = sizes, skipped: bool = skipped, evaluates: bool = evaluates) -> None:
            optimizer.zero_grad()
            for part, size in enumerate(sizes):
                loss = model(side.batch(10 * step + part, size, 16, WIDTH)).square().mean()
                loss.backward()
                side.record(f"loss {step}.{part}", loss)
            if evaluates:
                with torch.no_grad():
                    side.record(f"evaluated {step}", model(side.batch(7, 3, 16, WIDTH)).mean())
            if not skipped:
                optimizer.step()

        run.step(one)


@attack("the receipt is asked for after every step, and between forward and backward", treatments=APPLIED)
def receipts(side: Side) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value: Tensor = model(x).square().mean()
        for handle in side.handles:
            handle.receipt()
        return value

    train(side, Net(), loss=loss, batch=sentences(side))


@attack("lowtide.verify on a model that is being trained: it must be as it was afterwards", treatments=("operators",))
def verified(side: Side) -> None:
    model = without_dropout(stack()).to(side.device)
    if side.treatment is not None:
        lowtide.verify(model, side.treatment.policy(3), side.batch(0, 8, WIDTH))
    train(side, model)

"""Training loops as people write them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from attacks.harness import BOTH, TIDE, Run, Side, attack, train
from attacks.parts import WIDTH, Net, without_dropout
from attacks.treatments import ADAPTED, EVERY

__all__ = ["sentences", "steps_of"]


def sentences(side: Side) -> Callable[[int], Tensor]:
    return lambda step: side.batch(step, 8, 16, WIDTH)


def steps_of(
    side: Side,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    run: Run,
    *,
    steps: int = 10,
    after: Callable[[int], None] = lambda step: None,
    rows: Callable[[int], int] = lambda step: 8,
) -> None:
    """The plain loop, with something after each step."""
    for step in range(steps):

        def one(step: int = step) -> None:
            optimizer.zero_grad()
            loss = model(side.batch(step, rows(step), 16, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            side.record(f"loss {step}", loss)

        run.step(one)
        after(step)


# Schedulers, scalers, closures.


@attack("a learning rate scheduler made inside `with adapt`: AttributeError", treatments=ADAPTED, devices=BOTH)
def scheduler_inside(side: Side) -> None:
    model = Net().to(side.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = side.start(model, optimizer)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 20)
    steps_of(side, model, optimizer, run, after=lambda step: scheduler.step())
    side.record("rate", scheduler.get_last_lr()[0])


@attack("a scheduler made before adapt: no warning about the order of steps", treatments=ADAPTED, devices=BOTH)
def scheduler_before(side: Side) -> None:
    model = Net().to(side.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = lr_scheduler.OneCycleLR(optimizer, 1e-2, 20)
    run = side.start(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps_of(side, model, optimizer, run, after=lambda step: scheduler.step())
    side.record("rate", scheduler.get_last_lr()[0])


def scaled(side: Side, scaler: torch.amp.GradScaler, infinite: tuple[int, ...], fails: int = 0) -> None:
    model = Net().to(side.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = side.start(model, optimizer)
    for step in range(12):

        def one(step: int = step) -> None:
            optimizer.zero_grad()
            if step == fails and fails:
                run.fail_allocation(20)
            with torch.autocast(side.device.type, torch.bfloat16):
                loss = model(side.batch(step, 32, 16, WIDTH)).float().square().mean()
            if step in infinite:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            run.heal()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            side.record(f"loss {step}", loss)

        run.step(one)
        scaler.update()
        side.record(f"scale {step}", scaler.get_scale())


@attack("a GradScaler that skips steps with infinite gradients", treatments=ADAPTED, devices=BOTH)
def scaler_skips(side: Side) -> None:
    scaled(side, torch.amp.GradScaler(side.device.type, init_scale=2.0**10, growth_interval=3), (2, 6, 7))


@attack("GradScaler(enabled=False) while a step is repeated: AttributeError instead of a rescue", devices=TIDE,
        treatments=ADAPTED)  # fmt: skip
def scaler_disabled(side: Side) -> None:
    scaled(side, torch.amp.GradScaler(side.device.type, enabled=False), (), fails=8)


@attack("an enabled GradScaler while a step is repeated", devices=TIDE, treatments=ADAPTED)
def scaler_repeated(side: Side) -> None:
    scaled(side, torch.amp.GradScaler(side.device.type, init_scale=256.0), (), fails=8)


@attack("optimizer.step(closure), as Lightning does it", treatments=ADAPTED, devices=BOTH)
def closure(side: Side) -> None:
    model = Net().to(side.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = side.start(model, optimizer)
    for step in range(10):

        def compute(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(side.batch(step, 8, 16, WIDTH)).square().mean()
            loss.backward()
            side.record(f"loss {step}", loss)
            return loss

        run.step(lambda compute=compute: optimizer.step(compute))  # type: ignore[misc]


@attack("LBFGS calls its closure several times a step", treatments=ADAPTED, devices=BOTH)
def lbfgs(side: Side) -> None:
    model = without_dropout(Net()).to(side.device)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=3)
    run = side.start(model, optimizer)
    for step in range(8):

        def compute(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(side.batch(step, 8, 16, WIDTH)).square().mean()
            loss.backward()
            return loss

        side.record(f"loss {step}", run.step(lambda compute=compute: optimizer.step(compute)))  # type: ignore[misc]


# Steps that differ from one another.


@attack("evaluation between, changing batch sizes, layers frozen for some steps", treatments=ADAPTED, devices=BOTH)
def changing_steps(side: Side) -> None:
    model = Net().to(side.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = side.start(model, optimizer)

    def after(step: int) -> None:
        model.layers[0].requires_grad_(step not in (8, 9))
        if step % 4 == 3:
            model.eval()
            with torch.inference_mode():
                side.record(f"evaluated {step}", model(side.batch(500, 9, 16, WIDTH)).square().mean())
            model.train()

    steps_of(side, model, optimizer, run, steps=14, after=after, rows=lambda step: (8, 8, 6, 1, 8, 4)[step % 6])


@attack("layerdrop: layers are left out at random", treatments=EVERY, devices=BOTH)
def layerdrop(side: Side) -> None:
    class Dropping(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in self.layers:
                if torch.rand(()) >= 0.4:
                    x = layer(x)
            return self.last(x)

    train(side, Dropping(layers=4), batch=sentences(side), steps=10)


@attack("layers run in random order", treatments=EVERY, devices=BOTH)
def shuffled_layers(side: Side) -> None:
    class Shuffled(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for place in torch.randperm(4).tolist()[:3]:
                x = self.layers[place](x)
            return self.last(x)

    train(side, Shuffled(layers=4), batch=sentences(side), steps=10)


def raising(side: Side, *, in_backward: bool, inside: bool) -> None:
    """Every third step raises on purpose, and the loop goes on."""
    model = Net().to(side.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = side.start(model, optimizer)

    def fail(*_: Any) -> None:
        raise ValueError("on purpose")

    for step in range(13):  # the last one ends well: torch holds the graph of a backward that raised until the next one

        def one(step: int = step) -> None:
            optimizer.zero_grad()
            hooks = []
            if step % 3 == 2:
                layer: Any = model.layers[1]
                hooks = [
                    layer.down.weight.register_hook(fail) if in_backward else layer.down.register_forward_pre_hook(fail)
                ]
            try:
                loss = model(side.batch(step, 8, 16, WIDTH)).square().mean()
                loss.backward()
                optimizer.step()
                side.record(f"loss {step}", loss)
            except ValueError:
                if not inside:
                    raise
            finally:
                for hook in hooks:
                    hook.remove()

        try:
            run.step(one)
        except ValueError:
            continue


@attack("a forward that raises now and then, caught inside the step", treatments=EVERY, devices=BOTH)
def raises_in_forward_inside(side: Side) -> None:
    raising(side, in_backward=False, inside=True)


@attack("a forward that raises now and then, caught around the step", treatments=ADAPTED, devices=BOTH)
def raises_in_forward(side: Side) -> None:
    raising(side, in_backward=False, inside=False)


@attack("a backward that raises now and then, caught inside the step", treatments=EVERY, devices=BOTH)
def raises_in_backward_inside(side: Side) -> None:
    raising(side, in_backward=True, inside=True)


@attack("a backward that raises now and then, caught around the step", treatments=ADAPTED, devices=BOTH)
def raises_in_backward(side: Side) -> None:
    raising(side, in_backward=True, inside=False)

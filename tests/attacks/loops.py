"""Training loops as people write them."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import lr_scheduler

import lowtide
from attacks.harness import BOTH, PROFILING_STEPS, TIDE, Found, Run, Side, attack, train
from attacks.parts import WIDTH, Block, Net, stack, without_dropout
from attacks.treatments import ADAPTED, APPLIED, EVERY

__all__: list[str] = []


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


# Several models, several runs.


@attack("a GAN: two adaptive runs in one loop, whose contexts overlap", treatments=ADAPTED, devices=BOTH)
def gan(side: Side) -> None:
    generator, judge = Net().to(side.device), Net().to(side.device)
    makes, judges = (torch.optim.Adam(model.parameters(), lr=1e-3) for model in (generator, judge))
    first, second = side.start(generator, makes), side.start(judge, judges)
    for step in range(10):

        def one(step: int = step) -> None:
            noise, real = side.batch(step, 8, 16, WIDTH), side.batch(100 + step, 8, 16, WIDTH)
            judges.zero_grad()
            made = generator(noise)
            loss = judge(real).square().mean() - judge(made.detach()).mean()
            loss.backward()
            judges.step()
            makes.zero_grad()
            other = judge(made).mean()
            other.backward()
            makes.step()
            side.record(f"judge {step}", loss)
            side.record(f"generator {step}", other)

        first.step(lambda one=one: second.step(one))  # type: ignore[misc]


@attack("adapt is called twice on one model, as a notebook cell that is run again", treatments=ADAPTED, devices=BOTH)
def adapt_twice(side: Side) -> None:
    model = Net().to(side.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = side.start(model, optimizer)
    steps_of(side, model, optimizer, run, steps=3)
    run = side.start(model, optimizer)  # and the first is forgotten
    steps_of(side, model, optimizer, run, steps=9)


@attack("apply is called twice on one model, as a notebook cell that is run again", treatments=APPLIED)
def apply_twice(side: Side) -> None:
    model = Net().to(side.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = side.start(model, optimizer)
    steps_of(side, model, optimizer, run, steps=2)
    run = side.start(model, optimizer)
    steps_of(side, model, optimizer, run, steps=4)


@attack("adapt, remove, adapt again", treatments=ADAPTED, devices=BOTH)
def adapt_again(side: Side) -> None:
    model = Net().to(side.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for part in range(2):
        run = side.start(model, optimizer)
        steps_of(side, model, optimizer, run, steps=PROFILING_STEPS + 2)
        for adaptive in side.adaptives:
            adaptive.remove()
        side.record(f"part {part}", 1)


@attack("adapt is given a module that the loop never calls: it measured for ever, and said nothing", treatments=ADAPTED)
def never_called(side: Side) -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

    model = Wrapper().to(side.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = side.start(model, optimizer)
    steps_of(side, model.net, optimizer, run, steps=3 * PROFILING_STEPS)
    if run.adaptive is not None and not run.adaptive.events:
        raise Found("silently_wrong", "nothing was said about a model that never ran")


@attack("a plan that cannot fit stopped a loop that the rescue had carried so far", devices=TIDE, treatments=ADAPTED)
def plan_does_not_fit(side: Side) -> None:
    model = Net(lambda: Block(64), 4, 64).to(side.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if side.treated:
        import tide

        tide.configure(capacity=10 << 20)
    run = side.start(model, optimizer)
    for step in range(9):

        def one(step: int = step) -> None:
            optimizer.zero_grad()
            loss = model(side.batch(step, 2048, 64)).square().mean()
            loss.backward()
            optimizer.step()
            side.record(f"loss {step}", loss)

        run.step(one)


@attack("the loop ends right after the plan is made: a hook stayed, and torch.save failed", treatments=ADAPTED,
        devices=BOTH)  # fmt: skip
def ends_after_planning(side: Side) -> None:
    import io

    model = Net().to(side.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = side.start(model, optimizer)
    steps_of(side, model, optimizer, run, steps=PROFILING_STEPS + 1)
    torch.save(model, io.BytesIO())


@attack("torch.save(model) after every step of an adaptive run", treatments=ADAPTED, devices=BOTH)
def saved_every_step(side: Side) -> None:
    import io

    model = Net().to(side.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = side.start(model, optimizer)
    steps_of(side, model, optimizer, run, after=lambda step: torch.save(model, io.BytesIO()))


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

    for step in range(12):

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


# Graphs that are used in other ways than once, from the loss.


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


@attack("forward-mode AD over the layers, then backward of the tangent: other bits while profiling", treatments=EVERY,
        devices=BOTH)  # fmt: skip
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

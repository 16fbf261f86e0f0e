"""Several runs and several models at once, runs that are begun again, and runs that end at odd moments."""

from __future__ import annotations

import torch
from torch import nn

from attacks.harness import BOTH, PROFILING_STEPS, TIDE, Found, Side, attack
from attacks.loops import steps_of
from attacks.parts import WIDTH, Block, Net
from attacks.treatments import ADAPTED, APPLIED

__all__: list[str] = []


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

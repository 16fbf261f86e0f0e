"""Ctrl-C at any moment: nothing stays on, and the next step is exact."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

import lowtide
from attacks.harness import BOTH, PROFILING_STEPS, Found, Side, attack
from attacks.parts import WIDTH, Net, stack
from attacks.surroundings import Surroundings, settled, shape_of
from attacks.treatments import ADAPTED, APPLIED

__all__: list[str] = []

ROUNDS = 8


@contextmanager
def interrupted_within(seconds: float) -> Iterator[None]:
    """Raise KeyboardInterrupt after so long, unless the block ends before."""
    armed = [True]

    def strike(*_: Any) -> None:
        if armed[0]:
            armed[0] = False
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        armed[0] = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def still(around: Surroundings, where: str) -> None:
    """Nothing is on that was not before; the disk tier's threads work until the Policy is removed."""

    def changed() -> list[str]:
        return around.changed(replace(Surroundings.now(), threads=around.threads))

    if not settled(lambda: not changed()):
        raise Found("left_behind", f"{where}: {'; '.join(changed())}")


@attack("Ctrl-C at random moments of steps under a Policy: hooks or modes stayed on, the disk tier hung once",
        treatments=APPLIED, devices=BOTH)  # fmt: skip
def interrupted_steps(side: Side) -> None:
    model = stack().to(side.device)
    run = side.start(model)
    draw = random.Random(0)

    def gradients(label: str) -> None:
        torch.manual_seed(3)
        model(side.batch(0, 8, 16, WIDTH)).square().mean().backward()
        side.record_gradients(label, model)
        model.zero_grad()

    around = Surroundings.now()
    for turn in range(ROUNDS):
        if side.treated:
            with interrupted_within(draw.uniform(0.0002, 0.03)):
                for _ in range(20):
                    gradients("interrupted")
            model.zero_grad()
            still(around, f"interrupt {turn}")
        run.step(lambda turn=turn: gradients(f"after {turn}"))  # type: ignore[misc]
    gradients("interrupted")


def adaptive_rounds(side: Side, begin: Callable[[Any, int, Callable[[], None]], None]) -> None:
    """Adaptive runs that are interrupted, ended, and followed by plain steps."""
    draw = random.Random(1)
    for turn in range(ROUNDS):
        torch.manual_seed(turn)
        model = Net().to(side.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        shape, around = shape_of([model], [optimizer]), Surroundings.now()

        def one(model: Any = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            model(side.batch(0, 8, 16, WIDTH)).square().mean().backward()
            optimizer.step()

        if side.treated:
            run = lowtide.adapt(model, optimizer, profiling_steps=PROFILING_STEPS, verbose=False)
            with interrupted_within(draw.uniform(0.002, 0.25)):
                begin(run, turn, one)
            run.remove()
            still(around, f"interrupt {turn}")
            # What was interrupted while it was entered is left when it is collected.
            settled(lambda model=model, optimizer=optimizer, shape=shape: shape_of([model], [optimizer]) == shape)
            found = shape_of([model], [optimizer])
            if found != shape:
                changed = [name for name in shape if shape[name] != found[name]]
                raise Found("left_behind", f"interrupt {turn}: {changed[0]} is {found[changed[0]]}")
        torch.manual_seed(7)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.01)
        one()
        side.record_gradients(turn, model)


@attack("Ctrl-C at random moments of `run.step`", treatments=ADAPTED[:1], devices=BOTH)
def interrupted_adaptive_steps(side: Side) -> None:
    def begin(run: Any, turn: int, one: Callable[[], None]) -> None:
        for _ in range(12):
            run.step(one)

    adaptive_rounds(side, begin)


@attack("Ctrl-C at random moments of a loop inside `with adapt`", treatments=ADAPTED[1:], devices=BOTH)
def interrupted_adaptive_loop(side: Side) -> None:
    def begin(run: Any, turn: int, one: Callable[[], None]) -> None:
        with run:
            for _ in range(12):
                one()

    adaptive_rounds(side, begin)

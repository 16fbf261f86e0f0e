"""A run that adapts itself, and in each of whose steps the device's memory shrinks at another allocation.

The run goes on from step to step, as a user's would: plans are made anew where memory was missing, and what one step
left wrong would show in all that follow. Afterwards the same steps are run without lowtide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

import lowtide
import tide
from lowtide.adapt.session import Adaptive
from lowtide.policy import LayerPolicy, Pattern, Policy, Recompute, Rule
from sweep_cases import Outcome, Subject, phase_of, settled
from tide import faults

__all__ = ["SHARES", "How", "in_session"]

SHARES = (1 / 4, 1 / 64, 1 / 8, 1 / 16)
"""Of the activations' peak: by so much the capacity drops below what is allocated, in turns."""
How = Literal["step", "loop"]
"""Whether each step is given to the run, which can repeat it, or the run stands around a loop."""
OPERATORS = ("feed_forward_norm", "attention.wo")
FIXED = Policy(
    (LayerPolicy(Recompute()), LayerPolicy(rules=tuple(Rule(Pattern(one), Recompute()) for one in OPERATORS)))
)
"""Memory is plentiful before it shrinks, so that a plan would keep everything: some decisions are given."""


def in_session(subject: Subject, how: How, stride: int = 1, offset: int = 0) -> list[Outcome]:
    """Every ``stride``-th allocation of a step of an adaptive run, one step each."""
    subject.rescue.remove()
    subject.begin()
    losses: list[Tensor] = []
    outcomes: list[Outcome] = []
    # Before the run's own hooks: when the optimizer has stepped, memory is there again.
    hook = subject.optimizer.register_step_post_hook(lambda *_: faults.disarm())
    run = lowtide.adapt(subject.model, subject.optimizer, policy=FIXED, layers="layers", verbose=False)
    if how == "loop":
        run.__enter__()
    for _ in range(run.settings.profiling_steps + 1):
        losses.append(_stepped(subject, run, how, lambda: None))
    marks = dict(subject.marks)
    subject.optimizer.zero_grad()
    before = settled(-1, patience=0.1)
    for turn, number in enumerate(range(1 + offset, marks["optimizer"] + 1, stride)):
        nbytes = int(SHARES[turn % len(SHARES)] * subject.activations)
        outcome = Outcome(f"{how}, allocation {number}, {nbytes} bytes", phase_of(number, marks))
        outcomes.append(outcome)
        tide.clear_races()
        events = len(run.events)
        try:
            losses.append(_stepped(subject, run, how, lambda: faults.shrink_capacity(number, nbytes)))  # noqa: B023
        except Exception as error:
            outcome.died = f"{type(error).__name__}: {error}"
            break
        finally:
            faults.disarm()
        kinds = {event.kind for event in run.events[events:]}
        outcome.line = 3 if "repeated" in kinds else 2 if "rescued" in kinds else 0
        outcome.races = [str(race) for race in tide.races()]
        subject.optimizer.zero_grad()
        outcome.leaked = settled(before) - before
    hook.remove()
    run.__exit__(None, None, None) if how == "loop" else run.remove()
    subject.optimizer.zero_grad()
    _compare(subject, losses, outcomes)
    return outcomes


def _stepped(subject: Subject, run: Adaptive, how: How, disturb: Callable[[], None]) -> Tensor:
    """One step, disturbed at its first attempt."""
    attempts = 0

    def step() -> Tensor:
        nonlocal attempts
        attempts += 1
        faults.disarm()
        if attempts == 1:
            disturb()
        return subject.step()

    if how == "loop":
        return step()
    loss = run.step(step)
    assert loss is not None
    return loss


def _compare(subject: Subject, losses: list[Tensor], outcomes: list[Outcome]) -> None:
    """Run the same steps without lowtide, and note where they differ."""
    ended = subject.values()
    subject.begin()
    plain = [subject.step() for _ in losses]
    subject.optimizer.zero_grad()
    first = len(losses) - len(outcomes) if not (outcomes and outcomes[-1].died) else len(losses) - len(outcomes) + 1
    for place, (loss, expected) in enumerate(zip(losses, plain, strict=True)):
        if not torch.equal(loss.cpu(), expected.cpu()):
            outcomes[max(0, place - first)].different.append("loss")
    if outcomes and not outcomes[-1].died:
        outcomes[-1].different += subject.values().differ(ended)

"""A run that adapts itself, and in each of whose steps the device's memory shrinks at another allocation.

The run goes on from step to step, as a user's would: it re-plans on OOM, and what one step
left wrong would show in all that follow. Afterwards the same steps are run without lowtide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

import lowtide
import tide
from lowtide.adaptive.session import Adaptive
from lowtide.errors import RescueError
from lowtide.operators.layers import find_layers
from lowtide.policy import LayerPolicy, Pattern, Policy, Recompute, Rule
from support.garbage import collect_garbage
from support.sweep_cases import LAYOUTS, SHARES, Outcome, Subject, alone, phase_of, settled
from tide import faults

__all__ = ["in_session", "session_of", "session_on_ranks", "unsuspected"]

OPERATORS = ("feed_forward_norm", "attention.wo")
FIXED = (LayerPolicy(Recompute()), LayerPolicy(rules=tuple(Rule(Pattern(one), Recompute()) for one in OPERATORS)))
"""Memory is plentiful before it shrinks, so that a plan would keep everything: some decisions are given, in turns."""


def session_of(model: str, stride: int) -> list[Outcome]:
    """A model in a process of its own."""
    return in_session(alone(model, "none"), stride)


def session_on_ranks(layout: str, stride: int) -> list[Outcome]:
    """A model on several ranks, one of which has less memory in each step, in turns."""
    return in_session(LAYOUTS[layout](), stride)


def in_session(subject: Subject, stride: int = 1) -> list[Outcome]:
    """Every ``stride``-th allocation of a step of an adaptive run, one step each; of several ranks, of each of them."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    subject.rescue.remove()
    subject.begin()
    losses: list[Tensor] = []
    outcomes: list[Outcome] = []
    allocations = 0

    def stepped(*_: object) -> None:
        nonlocal allocations
        allocations = faults.allocations_seen()
        faults.disarm()

    # Before the run's own hooks: when the optimizer has stepped, memory is there again.
    hook = subject.optimizer.register_step_post_hook(stepped)
    run = _adapted(subject, "suspicion" if size == 1 else "always")  # a rank's trouble gives the other no reason
    while run.decided is None:
        losses.append(_stepped(subject, run, lambda: None).cpu())
    undisturbed = len(losses)
    marks = {**subject.marks, "optimizer": allocations}
    subject.optimizer.zero_grad()
    collect_garbage()
    before = int(torch.accelerator.memory_allocated())
    for turn in range(-(-_most(allocations) // stride) * size):
        failing, place = turn % size, turn // size
        number = 1 + place * stride % marks["optimizer"]
        nbytes = int(SHARES[place % len(SHARES)] * subject.activations)
        what = f"allocation {number}, {nbytes} bytes" if rank == failing else f"rank {failing} fails"
        outcome = Outcome(f"session, {what}", phase_of(number, marks))
        outcomes.append(outcome)
        tide.clear_races()
        events = len(run.events)

        def disturb(number: int = number, nbytes: int = nbytes, here: bool = rank == failing) -> None:
            if here:
                faults.shrink_capacity(number, nbytes)

        try:
            losses.append(_stepped(subject, run, disturb).cpu())
        except Exception as error:
            outcome.died = f"{type(error).__name__}: {error} {run.rescue and run.rescue.counts.reasons[-3:]}"
            if size > 1:
                raise RuntimeError(str(outcome)) from error
            break
        finally:
            faults.disarm()
        kinds = {event.kind for event in run.events[events:]}
        outcome.line = 3 if "retried" in kinds else 2 if "rescued" in kinds else 0
        outcome.races = [str(race) for race in tide.races()]
        subject.optimizer.zero_grad()
        outcome.leaked = settled(before) - before
    hook.remove()
    run.remove()
    subject.optimizer.zero_grad()
    _compare(subject, losses, undisturbed, outcomes)
    return outcomes


def unsuspected(model: str, stride: int, given: bool) -> list[Outcome]:
    """Memory shrinks at every ``stride``-th allocation of steps that gave no reason to be watched.

    ``given``: the run is given the steps, and can retry them; otherwise it is around a loop. After a step that ended in
    an error the run begins from the start.
    """
    subject = alone(model, "none")
    subject.rescue.remove()
    outcomes: list[Outcome] = []
    number, last = 1, 1
    while number <= last:
        subject.begin()
        run = _adapted(subject)
        if not given:
            run.__enter__()
        assert run.rescue is not None

        def step(number: int = 0, run: Adaptive = run) -> Tensor:
            def disturb() -> None:
                if number:
                    nbytes = int(SHARES[number // stride % len(SHARES)] * subject.activations)
                    faults.shrink_capacity(number, nbytes)

            if given:
                return _stepped(subject, run, disturb).cpu()
            faults.disarm()
            disturb()
            return subject.step().cpu()

        losses = [step()]
        while run.decided is None:
            losses.append(step())
        failed = False
        while number <= last and not failed:
            while run.rescue.armed:
                losses.append(step())
            losses.append(step())
            last = subject.marks["optimizer"]
            outcome = Outcome(f"unsuspected, allocation {number}", phase_of(number, subject.marks))
            outcomes.append(outcome)
            events = len(run.events)
            try:
                losses.append(step(number))
                outcome.line = 3 if "retried" in {event.kind for event in run.events[events:]} else 0
            except (torch.OutOfMemoryError, RescueError) as error:
                outcome.died, failed = f"{type(error).__name__}: {error}", True
            finally:
                faults.disarm()
            number += stride
        run.remove()
        subject.begin()
        for loss in losses:
            if not torch.equal(loss, subject.step().cpu()):
                outcomes[-1].different.append("loss")
    return outcomes


def _adapted(subject: Subject, watch: Literal["suspicion", "always"] = "suspicion") -> Adaptive:
    pipeline = subject.pipeline
    layers = (
        sum(len(chunk) for stage in pipeline.placement for chunk in stage)
        if pipeline
        else len(find_layers(subject.model, "layers").modules)
    )
    fixed = Policy(tuple(FIXED[layer % len(FIXED)] for layer in range(layers)))
    stage = dist.get_rank() if pipeline else 0
    return lowtide.adapt(
        subject.model,
        subject.optimizer,
        policy=fixed,
        layers="layers",
        pipeline=pipeline,
        stage=stage,
        watch=watch,
        verbose=False,
    )


def _most(allocations: int) -> int:
    """The most of any rank."""
    most = torch.tensor(allocations)
    if dist.is_initialized():
        dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def _stepped(subject: Subject, run: Adaptive, disturb: Callable[[], None]) -> Tensor:
    """One step, disturbed at its first attempt."""
    attempts = 0

    def step() -> Tensor:
        nonlocal attempts
        attempts += 1
        faults.disarm()
        if attempts == 1:
            disturb()
        return subject.step()

    loss = run.step(step)
    assert loss is not None
    return loss


def _compare(subject: Subject, losses: list[Tensor], undisturbed: int, outcomes: list[Outcome]) -> None:
    """Run the same steps without lowtide, and note where they differ; what does so early counts for the first."""
    ended = subject.values()
    subject.begin()
    plain = [subject.step() for _ in losses]
    subject.optimizer.zero_grad()
    for place, (loss, expected) in enumerate(zip(losses, plain, strict=True)):
        if not torch.equal(loss, expected.cpu()):
            outcomes[max(0, place - undisturbed)].different.append("loss")
    if outcomes and not outcomes[-1].died:
        outcomes[-1].different += subject.values().differ(ended)

"""Random Policies, and what a training run with one of them does otherwise than the same run without: nothing.

A case is known by its number: the model, the setting, the device, how the steps are run, the Policy and the limits all
follow from it.
"""

from __future__ import annotations

import gc
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

import tide
from lowtide.operators.survey import survey
from lowtide.policy import Decision, Keep, LayerPolicy, Pattern, Policy, Recompute, Rule, Swap
from lowtide.runtime.apply import Handle, apply
from lowtide.runtime.limits import Limits
from support.garbage import collect_garbage
from support.parity_models import MODELS, VOCABULARY, build, stacks_of

__all__ = ["DEVICES", "GRID", "Case", "Outcome", "Run", "case", "random_policy", "run_case"]

SETTINGS = ("fp32", "autocast", "dropout")
DEVICES = ("tide", "cpu")
ORDERS = ("one", "accumulated", "interleaved")
"""How a step's batch is run: at once; in two halves one after the other; or with both forwards before the backwards,
the first one's last, and a pass without gradients between."""
GRID = tuple(product(MODELS, SETTINGS, DEVICES))
STEPS = {"one": 3, "accumulated": 2, "interleaved": 2}


@dataclass(frozen=True)
class Case:
    """One run to compare."""

    number: int
    model: str
    setting: str
    device: str
    order: str
    policies: tuple[Policy, ...]
    """One for each stack of layers."""
    limits: Limits

    def __str__(self) -> str:
        return (
            f"case {self.number}: {self.model}, {self.setting}, {self.device}, {self.order},"
            f" host {self.limits.host_bytes}, disk {self.limits.disk_bytes}, in flight {self.limits.in_flight_bytes}\n"
            + "\n".join(policy.to_json() for policy in self.policies)
        )


@dataclass
class Outcome:
    """What a case showed."""

    case: Case
    different: list[str] = field(default_factory=list)
    """The values that are not bitwise those of the run without lowtide."""
    races: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    error: str = ""
    swaps: int = 0
    recomputes: int = 0
    """How often something was swapped, and how often a call or a whole layer was replayed."""

    @property
    def exact(self) -> bool:
        return not (self.different or self.races or self.leaks or self.error)

    def __str__(self) -> str:
        found = [self.error] if self.error else []
        found += [f"differs: {', '.join(self.different[:6])} ({len(self.different)})"] if self.different else []
        found += [f"race: {race}" for race in self.races[:2]] + [f"leak: {leak}" for leak in self.leaks]
        return "\n".join([*found, str(self.case)])


def case(number: int) -> Case:
    """The case of that number; any :data:`GRID`-long run of numbers covers all models, settings and devices."""
    model, setting, device = GRID[number % len(GRID)]
    draw = random.Random(number)
    order = draw.choice(ORDERS)
    policies = tuple(random_policy(draw, layers) for layers in operators(model, setting, device))
    limits = Limits(
        minimum_bytes=draw.choice((1, 1, 1, 1500)),
        host_bytes=draw.choice((1 << 26, 1 << 26, 1 << 26, 40_000, 0)),
        disk_bytes=draw.choice((1 << 26, 1 << 26, 1 << 26, 30_000, 0)),
        in_flight_bytes=draw.choice((1 << 26, 1 << 26, 10_000, 0)),
    )
    return Case(number, model, setting, device, order, policies, limits)


def random_policy(draw: random.Random, layers: tuple[tuple[str, ...], ...]) -> Policy:
    """Any Policy whose patterns all match; ``layers`` are the names of each layer's operators."""
    if draw.random() < 0.4:
        alike = random_layer(draw, layers[0])
        chosen = (alike,) * len(layers)
    else:
        chosen = tuple(random_layer(draw, names) for names in layers)
    return Policy(chosen, origin=draw.choice(("file", "solver")))


def random_layer(draw: random.Random, names: tuple[str, ...]) -> LayerPolicy:
    kind = draw.random()
    rules = random_rules(draw, names) if kind > 0.2 else ()
    default: Decision = Keep()
    if kind < 0.1 or kind > 0.85:
        default = Recompute()
    elif kind < 0.2 or kind > 0.7:
        default = random_swap(draw)
    return LayerPolicy(default, rules, random_swap(draw) if draw.random() < 0.4 else Keep())


def random_rules(draw: random.Random, names: tuple[str, ...]) -> tuple[Rule, ...]:
    share = draw.choice((0.1, 0.3, 0.6, 1.0))
    decisions = draw.choice((("swap",), ("recompute",), ("swap", "recompute"), ("swap", "recompute", "keep")))
    rules = [Rule(named(name), random_decision(draw, decisions)) for name in names if draw.random() < share]
    modules = sorted({name.rpartition(".")[0] for name in names} - {""})
    if modules and draw.random() < 0.3:  # everything below a module
        text = re.escape(draw.choice(modules)) + r"\..*"
        rules.append(Rule(Pattern(text, "path"), random_decision(draw, decisions)))
    draw.shuffle(rules)
    return tuple(rules)


def named(name: str) -> Pattern:
    return Pattern(name.replace(".", r"\.").replace("[*]", r"\[\*\]"))


def random_decision(draw: random.Random, decisions: tuple[str, ...]) -> Decision:
    chosen = draw.choice(decisions)
    return random_swap(draw) if chosen == "swap" else Recompute() if chosen == "recompute" else Keep()


def random_swap(draw: random.Random) -> Swap:
    if draw.random() < 0.1:
        return Swap(draw.randint(1, 2), unit="layers")
    return Swap(draw.randint(1, 30), draw.choice(("host", "host", "disk")))


@cache
def operators(model: str, setting: str, device: str) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """For each stack of layers of a model, the names of each layer's operators; some depend on the device."""
    bare = build(model, dropout=setting == "dropout").to(device)
    stacks = []
    for path in stacks_of(model):
        found = survey(bare, lambda: bare(tokens_of(0).to(device)), layers=path)
        names = [tuple(operator.name for operator in kind.operators) for kind in found.kinds]
        stacks.append(tuple(names[kind] for kind in found.kind_of))
    return tuple(stacks)


def tokens_of(step: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(step))


@dataclass(frozen=True)
class Run:
    """What a few steps of training gave."""

    values: dict[str, Tensor]
    """Every loss and gradient of every step, and the parameters at the end; on the host."""
    held: tuple[int, ...]
    """Device bytes allocated after each step, without the gradients."""


class Trainee:
    """A model that is trained again and again from the same start."""

    def __init__(self, model: str, setting: str, device: str) -> None:
        self.device, self.setting = torch.device(device), setting
        self.model = build(model, dropout=setting == "dropout").to(device)
        self.start = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.tokens = [tokens_of(step).to(device) for step in range(max(STEPS.values()))]

    def train(self, order: str, expected: tuple[int, ...] | None = None) -> Run:
        """Train; what is still allocated after a step is given a moment to become what is ``expected``."""
        with torch.no_grad():
            for parameter, start in zip(self.model.parameters(), self.start, strict=True):
                parameter.copy_(start)
        torch.manual_seed(1)
        self.model.zero_grad()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        values: dict[str, Tensor] = {}
        held: list[int] = []
        for step, tokens in enumerate(self.tokens[: STEPS[order]]):
            for number, loss in enumerate(self._losses(tokens, order)):
                values[f"loss {step}.{number}"] = loss.cpu()
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None:
                    values[f"gradient {step} {name}"] = parameter.grad.cpu()
            optimizer.step()
            optimizer.zero_grad()
            held.append(allocated(self.device, expected[step] if expected is not None else None))
        values |= {f"parameter {name}": parameter.detach().cpu() for name, parameter in self.model.named_parameters()}
        return Run(values, tuple(held))

    def _losses(self, tokens: Tensor, order: str) -> list[Tensor]:
        if order == "one":
            loss = self._forward(tokens)
            loss.backward()
            return [loss.detach()]
        first, second = tokens.chunk(2)
        if order == "accumulated":
            return [loss for part in (first, second) for loss in self._losses(part, "one")]
        losses = [self._forward(first), self._forward(second)]
        with torch.no_grad():
            losses.append(self._forward(first))
        for loss in (losses[1], losses[0]):
            loss.backward()
        return [loss.detach() for loss in losses]

    def _forward(self, tokens: Tensor) -> Tensor:
        autocast = self.setting == "autocast"
        with torch.autocast(self.device.type, torch.bfloat16) if autocast else nullcontext():
            loss: Tensor = self.model(tokens)
        return loss


def allocated(device: torch.device, expected: int | None) -> int:
    if device.type == "cpu":
        return 0
    if expected is not None:
        wait_for(lambda: torch.accelerator.memory_allocated() == expected)
    return int(torch.accelerator.memory_allocated())


def wait_for(condition: Callable[[], bool], seconds: float = 2.0) -> bool:
    """Whether it comes true soon; graphs can end late, and the disk works on its own threads."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        gc.collect()
        time.sleep(0.005)
    return True


@cache
def trainee(model: str, setting: str, device: str) -> Trainee:
    return Trainee(model, setting, device)


@cache
def baseline(model: str, setting: str, device: str, order: str) -> Run:
    """The same run without lowtide, as bytes above what was there before."""
    chosen = trainee(model, setting, device)
    with above(chosen.device) as rise:
        return rise(chosen.train(order))


@contextmanager
def above(device: torch.device) -> Iterator[Callable[[Run], Run]]:
    collect_garbage()  # building a model leaves cycles, and what they hold must not end while it is measured
    before = allocated(device, None)
    yield lambda run: Run(run.values, tuple(held - before for held in run.held))


def run_case(chosen: Case) -> Outcome:
    """Train with the case's Policy, and compare."""
    outcome = Outcome(chosen)
    cell = (chosen.model, chosen.setting, chosen.device)
    expected = baseline(*cell, chosen.order)
    subject = trainee(*cell)
    gc.disable()  # what the cycle collector finds is no concern here, and it takes longer than the steps
    try:
        _compare(chosen, subject, expected, outcome)
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {error}"
    finally:
        gc.enable()
    if not outcome.exact:  # nothing of it may show in the next case
        trainee.cache_clear()
        baseline.cache_clear()
        gc.collect()
        tide.clear_races()
    return outcome


def _compare(chosen: Case, subject: Trainee, expected: Run, outcome: Outcome) -> None:
    tide.clear_races()
    before = allocated(subject.device, None)
    held = tuple(before + more for more in expected.held)
    handles: list[Handle] = []
    try:
        for path, policy in zip(stacks_of(chosen.model), chosen.policies, strict=True):
            handles.append(apply(subject.model, policy, layers=path, limits=chosen.limits))
        found = subject.train(chosen.order, held)
        for line in (line for handle in handles for line in handle.ledger.lines.values()):
            outcome.swaps += line.swaps
            outcome.recomputes += line.recomputes
        outcome.leaks += [leak for handle in handles for leak in not_returned(handle)]
    finally:
        for handle in handles:
            handle.remove()
    outcome.different = [
        name
        for name in expected.values | found.values
        if name not in found.values
        or name not in expected.values
        or not same_bits(found.values[name], expected.values[name])
    ]
    outcome.races = [str(race) for race in tide.races()]
    if found.held != held:
        outcome.leaks.append(f"device bytes after each step {found.held}, without lowtide {held}")
    if not wait_for(lambda: allocated(subject.device, None) == before):
        outcome.leaks.append(f"device bytes at the end {allocated(subject.device, None)}, before {before}")


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are equal bit by bit, signs of zeros and NaNs included."""
    alike = first.dtype == second.dtype and first.shape == second.shape
    return alike and torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))


def not_returned(handle: Handle) -> list[str]:
    """What of host memory and disk is still in use though no graph is alive."""
    manager: Any = handle.manager
    disk = manager._disk

    def lent() -> dict[str, int]:
        stashed = sum(buffer.size for line in handle.ledger.lines.values() for buffer in line.stash)
        free = sum(size * len(offsets) for size, offsets in disk.free.items()) if disk is not None else 0
        return {
            "bytes of host buffers": manager.host_pool.taken + manager.pinned_pool.taken - stashed,
            "bytes of disk": disk.end - free if disk is not None else 0,
            "bytes on their way back": manager.reloads.bytes,
        }

    wait_for(lambda: not any(lent().values()))
    return [f"{size} {what} not returned" for what, size in lent().items() if size]

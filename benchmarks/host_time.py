"""Host time on the real clock: what Python and dispatch cost, which virtual time does not see.

Steps of the configurations alternate in random order, one step each a round, so that whatever else the machine does
meets all alike. A figure is the median over all rounds of the difference (or the ratio) of two steps of one round.
Where a model's tensors happen to be in memory makes its steps some percent slower or faster, so each configuration has
several models, and a round's figure is the mean of their steps. The garbage collector runs between rounds only.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from models import Attach

__all__ = ["Rounds", "count_calls", "measure"]

MODELS = 4
"""Of each configuration."""


@dataclass(frozen=True)
class Rounds:
    """Seconds of a step, by configuration and round."""

    seconds: dict[str, list[float]]

    def microseconds(self, name: str, reference: str, operators: int) -> float:
        """What a step takes longer than the reference's, for each of ``operators`` decided operators."""
        pairs = zip(self.seconds[name], self.seconds[reference], strict=True)
        return statistics.median(a - b for a, b in pairs) * 1e6 / operators

    def ratio(self, name: str, reference: str) -> float:
        """What a step takes, the reference's being 1."""
        pairs = zip(self.seconds[name], self.seconds[reference], strict=True)
        return statistics.median(a / b for a, b in pairs)


def measure(
    build: Callable[[], nn.Module],
    configurations: dict[str, Attach],
    budget: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Rounds:
    """Time every configuration on a model of its own for ``budget`` seconds in all.

    ``time.process_time`` as the clock counts the CPU time of all threads, and not what other processes take.
    """
    order = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in configurations}
    with ExitStack() as stack:
        models: list[tuple[str, nn.Module]] = []
        for _ in range(MODELS):
            for name, attach in configurations.items():
                models.append((name, build()))
                stack.enter_context(attach(models[-1][1]))
        for _ in range(3):  # lowtide profiles layers in the first, and caches fill
            for _, model in models:
                _step(model)
        stack.enter_context(_collector_paused())
        end = time.perf_counter() + budget
        while time.perf_counter() < end or len(seconds[models[0][0]]) < 20:
            gc.collect(0)
            order.shuffle(models)
            taken = dict.fromkeys(configurations, 0.0)
            for name, model in models:
                start = clock()
                _step(model)
                taken[name] += (clock() - start) / MODELS
            for name, one in taken.items():
                seconds[name].append(one)
    return Rounds(seconds)


def count_calls(model: nn.Module, attach: Attach) -> int:
    """How many Python and C functions one step calls."""
    calls = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    with attach(model):
        for _ in range(3):
            _step(model)
        sys.setprofile(profile)
        try:
            _step(model)
        finally:
            sys.setprofile(None)
    return calls


def _step(model: nn.Module) -> None:
    model().backward()


@contextmanager
def _collector_paused() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
        torch.set_num_threads(threads)

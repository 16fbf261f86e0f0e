"""The profiled steps of a run: what was measured, for each length of batches, and what is known of the layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack

from torch.optim import Optimizer

from lowtide.adaptive.journal import Journal
from lowtide.adaptive.lengths import Lengths
from lowtide.adaptive.model_parts import ModelParts
from lowtide.adaptive.ranks import Ranks
from lowtide.adaptive.step_profiler import TIMED_STEPS, StepProfiler
from lowtide.operators.kinds import LayerKind
from lowtide.runtime.follower import Structure

__all__ = ["Profiling"]

FRUITLESS = 5
"""Steps in a row that could not be measured before profiling is given up."""


class Profiling:
    """Profiles the steps of a model's parts on this rank, and holds the Traces of the whole model."""

    def __init__(self, model: ModelParts, optimizers: Sequence[Optimizer], ranks: Ranks, journal: Journal) -> None:
        self.model, self.ranks, self.journal = model, ranks, journal
        self.profilers = [
            StepProfiler(part, optimizers=optimizers, layers=model.layers, last=last)
            for part, last in zip(model.modules, model.has_last_layer, strict=True)
        ]
        self.lengths = Lengths()
        self.layer_kinds: list[dict[Structure, LayerKind]] = [{} for _ in model.modules]
        """The layers' profiles, by part."""
        self._fruitless = self._seen = 0

    def is_wanted(self, tokens: int) -> bool:
        """Whether a step with batches of this length should be profiled."""
        if self._fruitless >= FRUITLESS:
            return False
        return self.lengths.wanted(tokens) if tokens else not self.lengths.traces

    def prepare(self, stack: ExitStack, tokens: int) -> list[Callable[[], AbstractContextManager[None]]]:
        """Prepare the model for a profiled step; what is returned makes the contexts to enter when it begins."""
        for one in self.profilers:
            one.timed = 1 if tokens else TIMED_STEPS  # there may never be a second batch of the same length
        return [stack.enter_context(one.prepared()) for one in self.profilers]

    def step_ended(self, number: int, tokens: int) -> None:
        """A profiled step has ended: agree with all ranks on the model's Trace, if enough steps were recorded."""
        seen = sum(len(one.recorded) + (one.survey is not None) for one in self.profilers)
        self._fruitless = 0 if seen != self._seen else self._fruitless + 1
        self._seen = seen
        if self._fruitless == FRUITLESS:
            self.journal.note(
                number,
                "warned",
                f"{FRUITLESS} steps could not be measured: in none of them the model's forward and backward were seen,"
                " or hooks of your own held what it saved; no plan is made",
            )
        if not all(one.complete for one in self.profilers):
            return
        trace = self.ranks.trace([one.trace() for one in self.profilers], self.model.pipeline)
        self.lengths.add(tokens, trace)
        words = f" of {tokens} tokens" if tokens else ""
        self.journal.note(number, "measured", f"a step{words} was measured: {len(trace.parts)} kinds of layers")
        self.journal.measured(trace)
        for one, kinds in zip(self.profilers, self.layer_kinds, strict=True):
            kinds |= one.kinds()
            one.reset()
        self._seen = -1

    def optimizer_begins(self) -> None:
        """An optimizer's step begins."""
        for one in self.profilers:
            one.optimizer_begins()

    def optimizer_ends(self) -> None:
        """An optimizer's step has ended."""
        for one in self.profilers:
            one.optimizer_ends()

    def take_off(self) -> None:
        """Take off the modes and hooks of a step; an interrupt may have left some on."""
        for one in self.profilers:
            one.take_off()

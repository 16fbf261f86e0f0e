"""The profiled steps of a run: what was measured, for each shape of batches, and what is known of the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from math import prod
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lowtide._torch_private.checkpointing import runs_in_checkpoint
from lowtide._torch_private.compiled import is_compiled, runs_compiled, uncompiled
from lowtide.adaptive.journal import Journal
from lowtide.adaptive.lengths import ENOUGH, Lengths, Shape, are_apart, format_shape
from lowtide.adaptive.model_parts import ModelParts
from lowtide.adaptive.ranks import Ranks
from lowtide.adaptive.step_profiler import TIMED_STEPS, StepProfiler
from lowtide.errors import PolicyError
from lowtide.operators.kinds import LayerKind
from lowtide.operators.wrappers import Hook
from lowtide.runtime.follower import Structure

__all__ = ["Profiling"]

FRUITLESS = 5
"""Steps in a row that could not be measured before profiling is given up."""
MOST_TIMED = 6
"""Steps that are timed at most, where batches of different shapes are waited for."""
_COMPILED = (
    "the layers are compiled: the measured steps run in eager mode, where operators are seen, and so do steps that are"
    " watched for OOM; the plan counts what eager layers hold, and compiled ones hold less"
)
_ONE_GRAPH = (
    "the model is compiled as a whole: the measured steps run in eager mode, where operators are seen, and so do steps"
    " that are watched for OOM; the plan recomputes and does not swap, which a graph has no place for"
)
_NOT_IN_PLACE = (
    "adapt() was given a model inside a compiled one, and does not see its steps: pass what torch.compile returned, or"
    " compile its layers in place, as by layer.compile()"
)
_CHECKPOINTED = (
    "the model's own code runs its layers in torch.utils.checkpoint, which recomputes them whatever is planned: take"
    " that call out, and lowtide decides what is recomputed"
)
ROUNDS = 3
"""How often a run is profiled at most."""


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
        self._shapes: list[Shape] = []
        """The shapes of the batches of recorded steps that no Trace was made of yet."""
        self._rounds = 0
        """How often profiling was completed."""
        self._more = True
        self._fruitless = self._seen = 0
        self._checkpointed: bool | None = None
        """Whether the model's own code checkpoints its layers; None before one has run."""
        self._compiled = False
        """Whether the layers are compiled, and this was said."""

    @property
    def is_wanted(self) -> bool:
        """Whether the next step should be profiled."""
        return self._more and self._fruitless < FRUITLESS

    def want_more(self) -> None:
        """Batches are unlike those that were measured: measure some of them."""
        self._more = self._rounds < ROUNDS

    def prepare(self, stack: ExitStack) -> list[Callable[[], AbstractContextManager[None]]]:
        """Prepare the model for a profiled step; what is returned makes the contexts to enter when it begins."""
        if not self._rounds:
            stack.enter_context(self._looking_around())
        return [stack.enter_context(one.prepared()) for one in self.profilers]

    @contextmanager
    def _looking_around(self) -> Iterator[None]:
        """Say it once if the model's code runs its layers in ``torch.utils.checkpoint``, or is compiled."""

        def look(layer: nn.Module, args: Any) -> None:
            if self._checkpointed is None:
                self._checkpointed = runs_in_checkpoint()
                if self._checkpointed:
                    self.journal.note(0, "warned", _CHECKPOINTED)
            if not self._compiled and runs_compiled():
                in_place = is_compiled(layer) and uncompiled(layer) is layer
                if not in_place and not self.model.is_called_compiled:
                    raise PolicyError(_NOT_IN_PLACE)
                self._compiled = True
                self.journal.note(0, "measured", _COMPILED if in_place else _ONE_GRAPH)

        first = self.model.first_layer
        hook = first.register_forward_pre_hook(Hook(look))
        try:
            yield
        finally:
            hook.remove()

    def step_ended(self, number: int, shape: Shape) -> None:
        """A profiled step with batches of this shape has ended: agree with all ranks on the model's Traces, if enough
        steps were recorded."""
        self._note_fruitless(number)
        done = len(self._shapes)
        missing = not all(len(one.recorded) > done for one in self.profilers)
        shape, (missing,) = self.ranks.batch(shape, [missing])
        if missing:
            for one in self.profilers:
                del one.recorded[done:]
            return
        self._shapes.append(shape)
        if not self._enough():
            return
        for chosen in _apart(self._shapes):
            steps = [index for index, one in enumerate(self._shapes) if one == chosen]
            trace = self.ranks.trace([one.trace(of=steps) for one in self.profilers], self.model.pipeline)
            self.lengths.add(chosen, trace)
            words = f" with batches of {format_shape(chosen)}" if chosen else ""
            parts = f"{len(trace.parts)} kind{'s' * (len(trace.parts) > 1)} of layers"
            self.journal.note(number, "measured", f"a step{words} was measured: {parts}")
            self.journal.measured(trace)
            if len(self.lengths.traces) == 1:
                for text in self.model.uncovered(trace):
                    self.journal.note(number, "warned", text)
        for profiler, kinds in zip(self.profilers, self.layer_kinds, strict=True):
            kinds |= profiler.kinds()
            profiler.reset()
        self._shapes, self._seen, self._more = [], -1, False
        self._rounds += 1

    def _enough(self) -> bool:
        """Whether the recorded steps will do: several of one shape, or one of each of several shapes."""
        apart = _apart([*self.lengths.traces, *self._shapes])
        if len(apart) == 1:
            return len(self._shapes) >= TIMED_STEPS
        return len(apart) >= ENOUGH or len(self._shapes) >= MOST_TIMED

    def _note_fruitless(self, number: int) -> None:
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


def _apart(shapes: Iterable[Shape]) -> list[Shape]:
    """Those that differ enough, the largest first."""
    found: list[Shape] = []
    for shape in sorted(shapes, key=prod, reverse=True):
        if all(are_apart(shape, other) for other in found):
            found.append(shape)
    return found

"""Profile training steps as they run: a Trace of them, with the seconds that each kernel took.

The first step shows the operators and what they save; later steps are recorded and timed. What autograd saves is
offloaded meanwhile, so that a profiled step needs the least memory of all. See [Note: whose step it is] in
:mod:`lowtide.trace.phases`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from lowtide._torch_private.compiled import NothingCompiled
from lowtide._torch_private.saved_tensor_hooks import insert_saved_tensors_hooks, remove_saved_tensors_hooks
from lowtide.adaptive.host_copies import HostCopies
from lowtide.errors import TraceError
from lowtide.operators.kinds import LayerKind
from lowtide.operators.layers import find_layers
from lowtide.operators.saved import PackHook, unpack
from lowtide.operators.survey import Survey, surveying
from lowtide.operators.wrappers import take_back
from lowtide.runtime.follower import Structure, structure_of
from lowtide.runtime.refuse import refuse_compiled_function
from lowtide.trace.assemble import assemble
from lowtide.trace.in_place import change_in_place
from lowtide.trace.phases import Phases
from lowtide.trace.places import device_of, places
from lowtide.trace.recorder import RecordedKernel, Recorder
from lowtide.trace.trace import Trace

__all__ = ["TIMED_STEPS", "StepProfiler"]

TIMED_STEPS = 3
"""Steps that are timed, unless the caller asks for another number."""


class _RecordedStep(NamedTuple):
    """The recorder of one step, and the shape of what the model was given in it."""

    recorder: Recorder
    given: tuple[int, ...]


class StepProfiler:
    """Profiles a model while it is trained. Nothing of the training changes but the time it takes.

    ``profiler = StepProfiler(model, optimizers=[optimizer])``; then around whole steps, forward to
    ``optimizer.step()``, ``with profiler.step(): …``; once ``profiler.complete``, ``profiler.trace()`` is what
    :func:`capture` would return, with the optimizer's step and measured seconds.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizers: Sequence[Optimizer] = (),
        layers: str | None = None,
        last: bool = True,
        timed: int = TIMED_STEPS,
    ) -> None:
        """``layers`` names the module that holds the layers, where the longest run of equal children is not it.

        ``last`` is false for a pipeline stage that does not compute the loss. ``timed`` steps are enough.
        """
        self.model, self.optimizers, self.layers, self.last = model, tuple(optimizers), layers, last
        self.timed = timed
        self.survey: Survey | None = None
        self.recorded: list[_RecordedStep] = []
        self._hold: PackHook | None = None
        """The pack hook of the first step."""
        self._phases: Phases | None = None
        """Of the step that is being recorded."""
        self._recorder: Recorder | None = None
        """Of the step that was recorded last."""

    @property
    def complete(self) -> bool:
        """Whether enough steps were recorded."""
        return len(self.recorded) >= self.timed

    def kinds(self) -> dict[Structure, LayerKind]:
        """The layers' profiles, for the Policy that is applied next."""
        if self.survey is None:
            return {}
        layers = zip(self.survey.layers.modules, self.survey.kind_of, strict=True)
        return {structure_of(layer): self.survey.kinds[kind] for layer, kind in layers}

    def reset(self) -> None:
        """Forget the recorded steps, but not the operators: batches of another length are profiled next."""
        self.recorded, self._recorder = [], None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one whole step: all micro-batches forward and backward, and the optimizers' steps.

        A step that raises is not recorded.
        """
        hooks: list[Any] = []
        try:
            for optimizer in self.optimizers:
                hooks.append(optimizer.register_step_pre_hook(self.optimizer_begins))
                hooks.append(optimizer.register_step_post_hook(self.optimizer_ends))
            with self.prepared() as record, record():
                yield
        finally:
            take_back(hook.remove for hook in hooks)

    @contextmanager
    def prepared(self) -> Iterator[Callable[[], AbstractContextManager[None]]]:
        """As :meth:`step`, for a caller that reports the optimizers' steps and has no context around the whole step.

        Only the model is touched until the caller enters the context that the yielded function makes, when the step's
        first forward begins. What is compiled runs in eager mode: only there are operators seen.
        """
        with NothingCompiled(), self._surveying() if self.survey is None else self._recording() as record:
            yield record

    def optimizer_begins(self, *_: Any) -> None:
        """An optimizer's step begins."""
        if self._phases is not None:
            self._phases.optimizer_begins()

    def optimizer_ends(self, *_: Any) -> None:
        """An optimizer's step has ended."""
        if self._phases is not None:
            self._phases.optimizer_ends()

    def take_off(self) -> None:
        """Take off the modes and hooks that an interrupt may have left on."""
        if self._recorder is not None:
            self._recorder.take_off()
        if self._hold is not None:
            remove_saved_tensors_hooks(self._hold)

    @contextmanager
    def _surveying(self) -> Iterator[Callable[[], AbstractContextManager[None]]]:
        copies = HostCopies(at_once=False)
        hold = self._hold = copies.hold
        with surveying(
            self.model, layers=self.layers, hold=hold, written=copies.written, refuse=refuse_compiled_function
        ) as seen:
            yield partial(_holding, hold)
        found = seen()
        if found.held.total:  # otherwise nothing has run, or nothing with gradients
            self.survey = found

    @contextmanager
    def _recording(self) -> Iterator[Callable[[], AbstractContextManager[None]]]:
        layers = find_layers(self.model, self.layers).modules
        copies = HostCopies(at_once=True)
        device = device_of(self.model)
        recorder = Recorder(len(layers), hold=copies.hold, written=copies.written, device=device, timed=True)
        self._recorder = recorder
        phases = self._phases = Phases(self.model, self.optimizers, recorder, last=self.last)
        try:
            with places(self.model, layers, recorder), phases.following():
                yield partial(_uncollected, recorder)
        finally:
            self._phases = None
        if phases.whole and phases.intercepted:
            change_in_place(recorder)
            self.recorded.append(_RecordedStep(recorder, phases.given))

    def trace(self, *, name: str = "", of: Sequence[int] | None = None) -> Trace:
        """The Trace of the recorded steps, or of some of them. Waits for the device; TraceError if there are none."""
        recorded = self.recorded if of is None else [self.recorded[index] for index in of]
        if self.survey is None or not recorded:
            raise TraceError(
                f"{len(recorded)} steps were recorded, and a Trace needs at least one after the first, in which"
                " operators are profiled: run more inside step(), each with a forward and a backward of the model"
            )
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        first = recorded[0]
        kernels = first.recorder.kernels
        seconds, alike = _seconds(kernels, [one.recorder.kernels for one in recorded])
        samples, tokens = (first.given[0], prod(first.given[:2])) if first.given else (0, 0)
        trace = assemble(
            self.survey,
            first.recorder,
            first.recorder,
            seconds=seconds,
            model=self.model,
            optimizers=self.optimizers,
            name=name or type(self.model).__name__,
            layout=None,
            batch={"samples": samples, "tokens": tokens} if samples else {},
        )
        return replace(trace, notes=(*trace.notes, *(() if alike else (_NOT_ALIKE,))))


@contextmanager
def _holding(hold: PackHook) -> Iterator[None]:
    """Push the pack hook."""
    try:
        insert_saved_tensors_hooks(hold, unpack)
        yield
    finally:
        remove_saved_tensors_hooks(hold)


@contextmanager
def _uncollected(recorder: Recorder) -> Iterator[None]:
    """Record with the garbage collector off: what it frees in a cycle would be freed elsewhere in every step."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with recorder.recording():
            yield
    finally:
        if collecting:
            gc.enable()


_NOT_ALIKE = (
    "the measured steps did not all run the same kernels, as where routing or lengths change: the first of them is used"
    " for all"
)


def _seconds(kernels: Sequence[RecordedKernel], steps: Sequence[Sequence[RecordedKernel]]) -> tuple[list[float], bool]:
    """The median of what each kernel took, and whether all steps ran the same ones.

    Where they did not, it is the median over all kernels of the same kind and size.
    """
    wanted = [_key(kernel) for kernel in kernels]
    if all([_key(kernel) for kernel in step] == wanted for step in steps):
        return [median(column) for column in zip(*([one.seconds for one in step] for step in steps), strict=True)], True
    found: dict[tuple[str, str, int, int], list[float]] = {}
    for step in steps:
        for kernel in step:
            found.setdefault(_key(kernel), []).append(kernel.seconds)
    return [median(found[key]) for key in wanted], False


def _key(kernel: RecordedKernel) -> tuple[str, str, int, int]:
    # Not the shape as it is written: it has numbers that change from step to step, as an optimizer's do.
    return kernel.kind, kernel.dtype, kernel.flops, kernel.touched

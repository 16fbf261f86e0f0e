"""An adaptive run: profiled for some steps, planned, switched to its plan, and monitored from then on.

[Note: the life of a run]
The first steps run under the safe Policy, which recomputes every layer. Some of them are profiled: no Policy is
applied, and everything that is saved for backward is offloaded immediately, which needs the least memory of all. When
enough steps were profiled, all ranks agree on one Trace, the first rank makes the plan, every rank checks that it has
the same Policy, and the Policy is applied between two steps. From then on every step is compared with its plan. After
an OOM, or when memory is not as planned, the run is re-planned, at most as often as the settings allow.

Where batches have lengths, there is a plan for each length, rounded up: see :mod:`lowtide.adaptive.lengths`. A step
with a batch longer than any so far is profiled.

A Policy changes no value, so it does not matter to the training when it is switched.

Before a step begins only the model and its optimizers are touched. For steps of the user's loop see [Note: steps of
the user's loop]. What all ranks decide together is decided at the end of a step, which every rank reaches; a later
pipeline stage is called only after the first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from lowtide.adaptive.clock import Clock
from lowtide.adaptive.decide import Decided, safe_policy
from lowtide.adaptive.journal import Journal
from lowtide.adaptive.model_parts import ModelParts
from lowtide.adaptive.planning import Planning
from lowtide.adaptive.profiling import Profiling
from lowtide.adaptive.ranks import Ranks
from lowtide.adaptive.record import AdaptRecord, Kind
from lowtide.adaptive.rescue import Rescue
from lowtide.adaptive.settings import AdaptSettings
from lowtide.adaptive.user_loop import UserLoop, unwrapped
from lowtide.errors import RescueError
from lowtide.operators.calls import tensors_of
from lowtide.out_of_memory import is_out_of_memory
from lowtide.planner.pipeline import Pipeline
from lowtide.planner.plan import Plan
from lowtide.policy import Policy
from lowtide.runtime.apply import Handle, apply

__all__ = ["Adaptive"]

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

FIRST_PROFILED = 2
"""The first step that is profiled: step 1 makes the optimizer's states, unlike the others."""

_RUNS: WeakSet[Adaptive] = WeakSet()
"""The runs that were not removed. A model has one: each of two would take the other's work for the model's."""


class Adaptive:
    """An adaptive run. Pass each step to :meth:`step`, or put ``with`` around the training loop."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        optimizers: Sequence[Optimizer] = (),
        settings: AdaptSettings | None = None,
        *,
        fixed: Policy | None = None,
        scaler: torch.amp.GradScaler | None = None,
        pipeline: Pipeline | None = None,
        stage: int = 0,
        layers: str | None = None,
        directory: Path | None = None,
        host_is_meant: bool = False,
        say: Callable[[str], None] = logger.info,
        report: Callable[[Plan], None] | None = None,
    ) -> None:
        self.optimizers = tuple(map(unwrapped, optimizers))
        self.settings = settings or AdaptSettings()
        self.host_is_meant = host_is_meant
        """Whether a model that is on the CPU, though there is a device, is there on purpose."""
        self.ranks = Ranks(stage)
        self.model = ModelParts(parts, layers, pipeline, stage)
        fixed = self.model.complete(fixed) if fixed is not None else None
        self.clock = Clock(self.model.device())
        self.journal = Journal(
            directory,
            say,
            report,
            lambda: self.clock.capacity(),
            verbose=self.settings.verbose,
            first=self.ranks.first,
        )
        self.events, self.steps = self.journal.events, self.journal.steps
        self.profiling = Profiling(self.model, self.optimizers, self.ranks, self.journal)
        self.planning = Planning(self.settings, self.ranks, self.model.pipeline, fixed, self.journal)
        self.plans = self.planning.plans
        """What was decided for each length; 0 where batches have none."""
        self.scaler = scaler
        self.rescue: Rescue | None = None
        self.policy = self.safe = safe_policy(self.model.total, fixed)
        self.handles: list[Handle] = []
        """Of the applied Policy; none while no Policy is."""
        self.number = 0
        """Steps that have ended."""
        self.tokens = 0
        """The length of the running step's batches; 0 where they have none."""
        self.profiled = False
        """Whether the running step is profiled."""
        self.decided: Decided | None = None
        """What was decided for the running step; None before the first plan, and where the step is profiled."""
        self._failed = False
        """Whether an allocation failed in the step that has just ended."""
        self._compact = False
        """Whether to compact memory when the next step's first forward begins."""
        replaced = [other for other in _RUNS if not _objects(other).isdisjoint(_objects(self))]
        for other in replaced:
            other.remove()
        if replaced:
            self.say("warned", "an earlier adapt() of the same model or optimizer was removed: this one replaces it")
        self._make_rescue()
        self.loop = UserLoop(self)
        _RUNS.add(self)

    def _make_rescue(self) -> None:
        if not self.settings.rescue or self.clock.device.type == "cpu":
            return
        several = len(self.model.modules) > 1
        self.rescue = Rescue(
            nn.ModuleList(self.model.modules) if several else self.model.modules[0],
            self.optimizers,
            smallest=self.settings.smallest,
            multiple=self.settings.multiple,
            group=self.ranks.all.group,
            layers=None if several else self.model.layers,
            scalers=[self.scaler] if self.scaler is not None else [],
        )
        self.rescue.arm()
        self.rescue.watches_optimizer = lambda: bool(self.planning.suspicion.short(self._bucket, self.clock))
        for handle in self.handles:
            self.rescue.follow(handle)

    def _locate(self) -> None:
        """Before the first step: find the device again, to which the model may have been moved since."""
        device = self.model.device()
        if device != self.clock.device and self.rescue is None:
            self.clock = Clock(device)
            self._make_rescue()
        unrescued = self.settings.rescue and device.type == "cpu" and torch.accelerator.is_available()
        if unrescued and not self.host_is_meant:
            text = "the model is on the CPU, where nothing is rescued; move it to its device before its first step"
            self.say("warned", text)

    # Steps.

    def step(self, run: Callable[[], Result] | None = None, *, tokens: int | None = None) -> Result | None:
        """Run one whole training step, forward, backward and optimizer, and return what it returns.

        ``run`` is retried on OOM if nothing else helps, so whatever it changes besides the model, its gradients and its
        optimizers, such as a data loader, stays outside. ``tokens`` is the length of the step's micro-batches, where
        that varies: then each length has its plan. Without ``run``, a step of the user's loop has ended.
        """
        if run is None:
            self.loop.end()
            return None
        self.loop.abort()
        if not self.number:
            self._locate()
        self._before(tokens or 0)
        self._begin()
        with self.loop.whole_step():
            try:
                attempts = self._attempts()
                if self.rescue is not None:
                    result = self.rescue.run(run, attempts)
                else:
                    with attempts():
                        result = run()
            except BaseException as error:
                self.take_off()
                _refuse_transforms(error)
                raise
        self.end_step()
        self.loop.note_calls(self.loop.called)
        return result

    def _attempts(self) -> Callable[[], AbstractContextManager[None]]:
        """The context of each attempt at a step. A retry has no Policy: what a layer recomputes cannot be offloaded."""
        attempts = count()

        @contextmanager
        def attempt() -> Iterator[None]:
            if next(attempts):
                self._use(None)
            with ExitStack() as stack:
                for record in self._prepared(stack):
                    stack.enter_context(record())
                yield

        return attempt

    def _prepared(self, stack: ExitStack) -> list[Callable[[], AbstractContextManager[None]]]:
        return self.profiling.prepare(stack, self.tokens) if self.profiled else []

    def prepare(self) -> None:
        """Prepare the model for the next step of the user's loop."""
        self.loop.prepare()

    def prepare_step(self, stack: ExitStack) -> list[Callable[[], AbstractContextManager[None]]]:
        """Choose the next step's Policy, or profile it; what is returned makes the contexts to enter when it begins."""
        self._before(0)
        return self._prepared(stack)

    def begin_step(self, running: ExitStack) -> None:
        """A step of the user's loop begins: watch for OOM in it, below the modes that are on already."""
        if not self.number:
            self._locate()
        if self.rescue is not None:
            running.enter_context(self.rescue.watching())
        self._begin()

    def _begin(self) -> None:
        """A step begins: time it, and say how much may be allocated in it."""
        self.clock.begin()
        if self.rescue is not None:
            decided = self.decided
            self.rescue.watermark = None
            if decided is not None and decided.plan.feasible:
                self.rescue.watermark = decided.budget + self.planning.others(self._bucket, self.clock)

    def _before(self, tokens: int) -> None:
        """Choose what the next step is: profiled, under the safe Policy, or planned."""
        self._settle()
        self.tokens = self.ranks.largest(tokens) if tokens else 0
        profiled_from = min(FIRST_PROFILED, self.settings.profiling_steps)
        self.profiled = self.number + 1 >= profiled_from and self.profiling.is_wanted(self.tokens)
        unplanned = self.number < self.settings.profiling_steps or not self.profiling.lengths.traces
        self.decided = None if self.profiled or unplanned else self._planned()
        if self.decided is not None:
            self._use(self.decided.policy)
        else:
            self._use(None if self.profiled else self.safe)
        if self.rescue is not None:
            self._arm(self.rescue)

    def _arm(self, rescue: Rescue) -> None:
        """Watch every operator of the next step if there is a reason. See [Note: armed on suspicion]."""
        decided, suspicion = self.decided, self.planning.suspicion
        together = (
            self.settings.watch == "always"
            or decided is None
            or decided.policy is None
            or decided.scarce
            or suspicion.together(self._bucket, self.number + 1)
        )
        watched = suspicion.before(self.number + 1) or self._bucket in self.planning.monitor.lacking
        if together or watched:
            rescue.arm(together=together)
        else:
            rescue.disarm()

    def model_begins(self, inputs: Any) -> None:
        """The model is called in a step, with these arguments: watch the step if there is a reason to."""
        if self.rescue is None or self.decided is None:
            return
        step = self.number + 1
        reason = self.planning.suspicion.at_door(self._bucket, step, tensors_of(inputs), self.clock)
        if reason and not self.rescue.armed:
            logger.debug("step %d is watched: %s", step, reason)
            self.rescue.arm_now()

    @property
    def _bucket(self) -> int:
        """The length that the running step is planned as; 0 where batches have none."""
        return self.profiling.lengths.bucket(self.tokens) if self.tokens else 0

    def end_step(self) -> None:
        """A step has ended: take its Trace if it was profiled, compare it with its plan if there is one."""
        self.number += 1
        self.clock.end(self.number, "measuring" if self.decided is None else "planned", self._count_rescues())
        if self.profiled:
            self.profiling.step_ended(self.number, self.tokens)
        elif self.decided is None:
            self.planning.safe_step_ended(self.number, self.clock)
        elif self.decided.policy is not None:
            self.planning.suspicion.ended(self._bucket, self.number, self.clock, failed=self._failed)
            self.planning.compare(self.number, self._bucket, self.decided.plan.simulation, self.clock)

    def _settle(self) -> None:
        """Record the last step; the device has reached its end by now."""
        if (last := self.clock.last()) is not None:
            self.journal.ended(last)

    def _count_rescues(self) -> int:
        if self.rescue is None:
            return 0
        counts = self.rescue.counts.taken()
        self._failed = counts.any
        if counts.any:
            if self.decided is not None and self.decided.policy is not None:
                self.planning.monitor.missed(self._bucket, self.number, counts.missing)
            self.say("retried" if counts.retried_steps else "rescued", "; ".join(counts.reasons[:3]))
        return counts.retried_operators + counts.retried_steps + counts.watermark

    def take_off(self) -> None:
        """Take off the modes and hooks of a step; an interrupt may have left some on."""
        self.profiling.take_off()
        if self.rescue is not None:
            self.rescue.end_step()

    # The plan.

    def _planned(self) -> Decided:
        """What was decided for batches of this length; decided now, if the length is new."""
        bucket, rescue = self._bucket, self.rescue
        if bucket not in self.plans:
            self._use(None)
            if self.planning.wants_compact_memory(bucket):  # segments of earlier steps have other sizes than the plan's
                self._compact = rescue is not None
                if rescue is None:
                    self.clock.empty_cache()
            trace = self.profiling.lengths.trace(bucket)
            assert trace is not None
            others = max(0, self.clock.memory().allocated - self.model.bytes_with(self.optimizers))
            self.planning.make(self.number, bucket, trace, self.clock, rescued=rescue is not None, others=others)
        return self.plans[bucket]

    def compact_if_due(self) -> None:
        """Compact memory before the first step of a plan: when its forward begins, old gradients are gone."""
        if self._compact and self.rescue is not None:
            self._compact = False
            self.rescue.pager.compact()

    def _use(self, policy: Policy | None) -> None:
        """Apply a Policy in place of the current one, or none."""
        if self.handles:
            if policy == self.policy:
                return
            for handle, kinds in zip(self.handles, self.profiling.layer_kinds, strict=False):
                if self.rescue is not None:
                    self.rescue.unfollow(handle)
                handle.remove()
                kinds |= handle.profiles
            self.handles = []
        if policy is None:
            return
        self.policy = policy
        model, known = self.model, self.profiling.layer_kinds
        for part, mine, kinds in zip(model.modules, model.split(policy), known, strict=True):
            handle = apply(part, mine, layers=model.layers, allow_unmatched=not model.is_whole, profiles=kinds)
            self.handles.append(handle)
            if self.rescue is not None:
                self.rescue.follow(handle)

    # What it shows.

    def say(self, kind: Kind, text: str) -> None:
        """Record an event of the running step, and print it if the run is verbose."""
        self.journal.note(self.number, kind, text)

    @property
    def plan(self) -> Plan | None:
        """The last plan that was made."""
        return self.journal.plan

    @property
    def record(self) -> AdaptRecord:
        """What happened so far."""
        return self.journal.record

    # Its end.

    def __enter__(self) -> Adaptive:
        self.loop.ended_by_optimizers = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        watched = self.rescue is None or self.rescue.armed  # removing it disarms it
        try:
            self.remove()
        except RescueError as remaining:
            if error is None:
                raise
            error.add_note(str(remaining))  # the loop's own error is the one to report
        if error is not None:
            _refuse_transforms(error)
            if not watched and is_out_of_memory(error):
                error.add_note(
                    "lowtide: nothing had hinted at this step running out of memory, so its operators were not watched;"
                    " give whole steps to run.step(...), which retries them, or watch all: adapt(..., watch='always')"
                )

    def remove(self) -> None:
        """Restore the model and its optimizers.

        RescueError if the device has no room to reload what is on the host: free memory and call this again.
        """
        self.loop.abort()
        self.loop.remove()
        self._settle()
        self.journal.save()
        self._use(None)
        self._compact = False
        _RUNS.discard(self)
        try:
            if self.rescue is not None:
                self.rescue.remove()
        finally:
            self.ranks.close()


def _refuse_transforms(error: BaseException) -> None:
    """RescueError in place of torch's error, where torch.func does not allow our saved-tensor hooks."""
    if isinstance(error, RuntimeError) and "support saved tensor hooks" in str(error):
        raise RescueError(
            "a step computes gradients by torch.func, which allows no saved-tensor hooks, and adapt() has some on while"
            " it measures and where memory is short; compute them by torch.autograd, or use lowtide.apply with a Policy"
        ) from error


def _objects(run: Adaptive) -> set[int]:
    """The modules and optimizers of a run, by identity."""
    return {id(one) for part in run.model.modules for one in part.modules()} | {id(one) for one in run.optimizers}

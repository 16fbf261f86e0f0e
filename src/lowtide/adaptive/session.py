"""An adaptive run: profiled for some steps, planned, switched to its plan, and monitored from then on.

[Note: the life of a run]
The first steps run under the safe Policy, which recomputes every layer. Some of them are profiled: no Policy is
applied, and everything that is saved for backward is offloaded immediately, which needs the least memory of all. When
enough steps were profiled, all ranks agree on one Trace, the first rank makes the plan, every rank checks that it has
the same Policy, and the Policy is applied between two steps. From then on every step is compared with its plan. After
an OOM, or when memory is not as planned, the run is re-planned, at most as often as the settings allow.

Where batches of different shapes were profiled, there is a plan for each bucket of shapes, and it is chosen at the
door: when the model is called for the first time in a step. See [Note: batches of different shapes] and
[Note: ranks with batches of different shapes]. Where only one shape was profiled nothing is chosen at the door; after
some batches of other shapes, more steps are profiled.

A Policy changes no value, so it does not matter to the training when it is switched.

Before a step begins only the model and its optimizers are touched. For steps of the user's loop see [Note: steps of
the user's loop]. What all ranks decide together is decided at the end of a step, which every rank reaches; a later
pipeline stage is called only after the first.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowtide.adaptive.clock import Clock
from lowtide.adaptive.decide import Decided, safe_policy
from lowtide.adaptive.fragmentation import Fragmentation
from lowtide.adaptive.journal import Journal
from lowtide.adaptive.lengths import Shape, larger_of
from lowtide.adaptive.model_parts import ModelParts
from lowtide.adaptive.plan_monitor import QUERY
from lowtide.adaptive.planning import Planning
from lowtide.adaptive.profiling import Profiling
from lowtide.adaptive.ranks import Ranks
from lowtide.adaptive.record import AdaptRecord, Kind
from lowtide.adaptive.rescue import Rescue
from lowtide.adaptive.settings import AdaptSettings
from lowtide.adaptive.step_parts import StepParts
from lowtide.adaptive.user_loop import UserLoop, check_optimizers, unwrapped
from lowtide.errors import RescueError
from lowtide.operators.layers import check_module
from lowtide.out_of_memory import is_out_of_memory
from lowtide.planner.pipeline import Pipeline
from lowtide.planner.plan import Plan
from lowtide.policy import Policy
from lowtide.runtime.apply import Handle, apply
from lowtide.runtime.limits import Limits

__all__ = ["Adaptive", "runs_of"]

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

UNLIKE, RECENT = 3, 20
"""Steps with batches unlike those that were measured before more are profiled, and among how many they must be: the
last batch of an epoch is no reason."""
CHECKPOINTING = 3
"""Steps before which gradient checkpointing is looked for: frameworks turn it on late."""
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
        limits: Limits | None = None,
        host_is_meant: bool = False,
        say: Callable[[str], None] = logger.info,
        report: Callable[[Plan], None] | None = None,
    ) -> None:
        for part in parts:
            check_module(part, "adapt")
        self.optimizers = tuple(map(unwrapped, optimizers))
        check_optimizers(self.optimizers, parts)
        self.settings = settings or AdaptSettings()
        self.limits = limits
        """What swapping may take; None for the usual limits."""
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
        lengths = self.profiling.lengths
        self.planning = Planning(self.settings, self.ranks, lengths, self.model, fixed, self.journal)
        self.plans = self.planning.plans
        """What was decided for each bucket of batches."""
        self.scaler = scaler
        self.rescue: Rescue | None = None
        self.policy = self.safe = safe_policy(self.model.total, fixed)
        self.handles: list[Handle] = []
        """Of the applied Policy; none while no Policy is."""
        self.number = 0
        """Steps that have ended."""
        self.shape: Shape = ()
        """That of the running step's first batch; of the largest, where steps have several."""
        self.bucket: Shape = ()
        """The one whose plan the running step is under."""
        self._at_door = True
        """Whether the model was not called yet in the running step."""
        self._differing: deque[Shape] = deque(maxlen=QUERY)
        """What covers the batches of the last steps that had several, of different shapes."""
        self._unlike: deque[int] = deque(maxlen=UNLIKE)
        """The last steps with batches unlike those that were measured."""
        self.profiled = False
        """Whether the running step is profiled."""
        self.decided: Decided | None = None
        """What was decided for the running step; None before the first plan, and where the step is profiled."""
        self._fragmentation = Fragmentation()
        self._failed = False
        """Whether an allocation failed in the step that has just ended."""
        self._compact = False
        """Whether to compact memory when the next step's first forward begins."""
        replaced = runs_of(*self.model.modules, *self.optimizers)
        for other in replaced:
            other.remove()
        if replaced:
            self.say("warned", "an earlier adapt() of the same model or optimizer was removed: this one replaces it")
        self._make_rescue()
        self.loop = UserLoop(self)
        self.parts = StepParts(self)
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
        self.rescue.watches_optimizer = lambda: bool(self.planning.suspicion.short(self.bucket, self.clock))
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

    def step(self, run: Callable[[], Result] | None = None) -> Result | None:
        """Run one whole training step, forward, backward and optimizer, and return what it returns.

        ``run`` is retried on OOM if nothing else helps, so whatever it changes besides the model, its gradients and its
        optimizers, such as a data loader, stays outside. Without ``run``, a step of the user's loop has ended.
        """
        if run is None:
            self.loop.end()
            return None
        self.loop.abort()
        if not self.number:
            self._locate()
        self._before()
        self.clock.begin()
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
        self.pass_door()
        self.end_step()
        self.loop.note_calls(self.loop.called)
        return result

    def part(self, run: Callable[[], Result], *, last: bool = True) -> Result:
        """Run a part of a step of the user's loop, such as a micro-batch, and return what it returns.

        Forward and backward of it are in ``run``. On OOM, if nothing else helps, it is retried together with the parts
        of this step that came before; ``last`` says that no other one follows. The step still ends where it would
        without this. See [Note: parts of a step].
        """
        return self.parts.run_part(run, last=last)

    def restart_step(self, restore: Callable[[], None]) -> None:
        """Begin the running step of the user's loop from its start, without a Policy; ``restore`` what it changed."""
        self.loop.abort()
        restore()
        self.pass_door()
        self._use(None)
        self.loop.prepare_again()

    def _attempts(self) -> Callable[[], AbstractContextManager[None]]:
        """The context of each attempt at a step. A retry has no Policy: what a layer recomputes cannot be offloaded."""
        attempts = count()

        @contextmanager
        def attempt() -> Iterator[None]:
            if next(attempts):
                self.pass_door()
                self._use(None)
            with ExitStack() as stack:
                for record in self.prepare_contexts(stack):
                    stack.enter_context(record())
                yield

        return attempt

    def prepare(self) -> None:
        """Prepare the model for the next step of the user's loop."""
        self.loop.prepare()

    def prepare_contexts(self, stack: ExitStack) -> list[Callable[[], AbstractContextManager[None]]]:
        """The contexts of the next step, or of the retried one: see :meth:`prepare_step`."""
        return self.profiling.prepare(stack) if self.profiled else []

    def prepare_step(self, stack: ExitStack) -> list[Callable[[], AbstractContextManager[None]]]:
        """Choose the next step's Policy, or profile it; what is returned makes the contexts to enter when it begins."""
        self._before()
        return self.prepare_contexts(stack)

    def begin_step(self, running: ExitStack) -> None:
        """A step of the user's loop begins: watch for OOM in it, below the modes that are on already."""
        if not self.number:
            self._locate()
        if self.rescue is not None:
            running.enter_context(self.rescue.watching())
        self.clock.begin()

    def _before(self) -> None:
        """Choose what the next step is: profiled, under the safe Policy, or planned."""
        self._settle()
        self.clock.look_again()
        if self.number < CHECKPOINTING and (found := self.model.disable_checkpointing()):
            self.say("warned", f"gradient checkpointing was on ({found}): it is off until this run is removed")
        self._at_door, self.shape, self.decided = True, (), None
        profiling, planned_from = self.profiling, self.settings.profiling_steps or 0
        profiled_from = min(FIRST_PROFILED, planned_from or FIRST_PROFILED)
        self.profiled = self.number + 1 >= profiled_from and profiling.is_wanted
        if self.profiled:
            self._use(None)
        elif self.number < planned_from or not profiling.lengths.traces:
            self._use(self.safe)
        elif not profiling.lengths.vary:
            self._take_plan(profiling.lengths.bucket(()), in_background=False)
        if self.rescue is not None:
            self.rescue.watermark = None
            if self._is_chosen_at_door:
                self.rescue.disarm()
            else:
                self._arm(self.rescue)

    @property
    def _is_chosen_at_door(self) -> bool:
        """Whether the plan of the running step depends on its batch."""
        lengths = self.profiling.lengths
        return lengths.vary and not self.profiled and self.number >= (self.settings.profiling_steps or 0)

    def pass_door(self, inputs: Sequence[Tensor] = ()) -> None:
        """The model is called in a step: at its first call, choose the plan for batches of this shape.

        See [Note: ranks with batches of different shapes].
        """
        shape = tuple(inputs[0].shape) if inputs and self.model.is_whole else ()
        if not self._at_door:
            if shape and shape != self.shape and not self.profiled:
                self.shape = larger_of(self.shape, shape)
                self._differing.append(self.shape)
            return
        self._at_door, self.shape = False, shape
        self.clock.look_again()
        if not self._is_chosen_at_door:
            return
        for one in self._differing:
            shape = larger_of(shape, one)
        planning = self.planning
        flags = [planning.have_arrived(), planning.background.broken]
        self.shape, (arrived, broken) = planning.peers.batch(shape, flags)
        if arrived:
            planning.take_arrived(self.number, self._bytes_of_others())
        bucket = self.profiling.lengths.bucket(self.shape)
        self._take_plan(bucket, in_background=not broken)
        planning.ask(bucket, self.clock, rescued=self.rescue is not None, others=self._bytes_of_others)
        if self.rescue is not None:
            self._arm(self.rescue)

    def _arm(self, rescue: Rescue) -> None:
        """Watch every operator of the next step if there is a reason. See [Note: armed on suspicion]."""
        decided, suspicion, step = self.decided, self.planning.suspicion, self.number + 1
        unproved = decided is None or decided.policy is None or decided.scarce or suspicion.is_new(self.bucket)
        together = self.settings.watch == "always" or suspicion.together(step) or (unproved and self.planning.is_shared)
        watched = suspicion.before(step) or unproved or self.bucket in self.planning.monitor.lacking
        if together or watched:
            rescue.arm(together=together)
        elif not self._is_chosen_at_door:
            rescue.disarm()

    def model_begins(self, inputs: Sequence[Tensor]) -> None:
        """The model is called in a step that has begun: say how much may be allocated, and watch it for a reason."""
        decided = self.decided
        if self.rescue is None or decided is None:
            return
        if decided.plan.feasible:
            self.rescue.watermark = decided.budget + self.planning.others(self.bucket, self.clock)
        step = self.number + 1
        reason = self.planning.suspicion.at_door(self.bucket, step, inputs, self.clock)
        if reason and not self.rescue.armed:
            logger.debug("step %d is watched: %s", step, reason)
            self.rescue.arm(together=False)

    def end_step(self) -> None:
        """A step has ended: take its Trace if it was profiled, compare it with its plan if there is one."""
        self.number += 1
        self.clock.end(self.number, "measuring" if self.decided is None else "planned", self._count_rescues())
        if self.profiled:
            self.profiling.step_ended(self.number, self.shape)
        elif self.decided is None:
            self.planning.safe_step_ended(self.number, self.clock)
        else:
            self._planned_step_ended(self.decided)
        if not self.profiled and self.profiling.lengths.traces:
            unlike = len(self._unlike) == UNLIKE and self.number - self._unlike[0] < RECENT
            if self.planning.step_ended(self.number, self.bucket, unlike=unlike):
                self._unlike.clear()
                self.profiling.want_more()

    def _planned_step_ended(self, decided: Decided) -> None:
        clock = self.clock
        self.planning.compare(self.number, self.bucket, decided, clock)
        if decided.policy is None:
            return
        self.planning.suspicion.ended(self.bucket, self.number, clock, failed=self._failed)
        if self.shape and not self.profiling.lengths.tell(self.shape):
            self._unlike.append(self.number)
        if decided.keeps_everything:
            return
        if text := self._fragmentation.ended(clock.ended_with, clock.capacity(), clock.device.type):
            self.say("warned", text)

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
                self.planning.monitor.missed(self.bucket, self.number, counts.missing, self.clock.capacity())
            self.say("retried" if counts.retried_steps else "rescued", "; ".join(counts.reasons[:3]))
        return counts.retried_operators + counts.retried_steps + counts.watermark

    def take_off(self) -> None:
        """Take off the modes and hooks of a step; an interrupt may have left some on."""
        self.profiling.take_off()
        if self.rescue is not None:
            self.rescue.end_step()

    # The plan.

    def _take_plan(self, bucket: Shape, *, in_background: bool) -> None:
        """Put the next step under the plan for batches of a bucket; make it now if it is waited for."""
        planning, rescue = self.planning, self.rescue
        if planning.is_waited_for(bucket, in_background=in_background):
            self._use(None)
            if planning.wants_compact_memory(bucket):  # segments of earlier steps have other sizes than the plan's
                self._compact = rescue is not None
                if rescue is None:
                    self.clock.empty_cache()
            others = self._bytes_of_others()
            planning.make(self.number, bucket, self.clock, rescued=rescue is not None, others=others)
        found = planning.find(bucket)
        self.bucket = bucket if found is None else found
        self.decided = None if found is None else planning.plans[found]
        self._use(self.safe if self.decided is None else self.decided.policy)

    def _bytes_of_others(self) -> int:
        """What this process has on the device besides the model and its optimizers."""
        return max(0, self.clock.memory().allocated - self.model.bytes_with(self.optimizers))

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
            handle = apply(
                part,
                mine,
                layers=model.layers,
                limits=self.limits,
                allow_unmatched=not model.is_whole,
                profiles=kinds,
            )
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
        self.model.restore_checkpointing()
        self._compact = False
        self.planning.background.close()
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


def runs_of(*objects: nn.Module | Optimizer) -> list[Adaptive]:
    """The runs that were not removed and have one of these models, or a part of it, or one of these optimizers."""
    modules = [module for one in objects if isinstance(one, nn.Module) for module in one.modules()]
    mine = {id(one) for one in (*objects, *modules)}
    return [run for run in _RUNS if not mine.isdisjoint(_objects(run))]


def _objects(run: Adaptive) -> set[int]:
    """The modules and optimizers of a run, by identity."""
    return {id(one) for part in run.model.modules for one in part.modules()} | {id(one) for one in run.optimizers}

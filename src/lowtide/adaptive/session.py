"""An adaptive run: measured for some steps, planned, switched, and watched from then on.

[Note: the life of a run]
The first steps run under the safe Policy, every layer recomputed. In some of them no Policy is at work and everything
that is saved for backward goes to the host at once: those are measured, and need less memory than any other way. After
the last of them all ranks agree on one Trace, the first rank makes the plan, every rank proves that it has its Policy,
and the Policy is put to work between two steps. What follows is compared with the plan after every step; where an
allocation failed, or the memory is not what was planned, there is another plan, not more often than was asked for.

Where batches have lengths, there is a plan for each length that comes, rounded up: see
:mod:`lowtide.adaptive.lengths`. A batch longer than anything that is known is run as a measured step.

A Policy changes no value, so it does not matter to the training when the switch comes.

Nothing but the model and its optimizers is touched before a step begins. For the steps of somebody's own loop see
[Note: steps of somebody's own loop]. What all ranks decide together is decided at the end of a step, where every rank
comes: a pipeline's later stages are called only when the first has been.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from lowtide.adaptive.clock import Clock
from lowtide.adaptive.decide import Decided, Situation, decide, safe_policy
from lowtide.adaptive.journal import Journal
from lowtide.adaptive.lengths import Lengths
from lowtide.adaptive.loop import Loop, unwrapped
from lowtide.adaptive.machine import link_of
from lowtide.adaptive.measure import TIMED_STEPS, Measuring
from lowtide.adaptive.own_steps import OwnSteps
from lowtide.adaptive.ranks import Ranks
from lowtide.adaptive.record import AdaptRecord, AdaptStep, Kind, Phase
from lowtide.adaptive.rescue import Rescue
from lowtide.adaptive.settings import AdaptSettings
from lowtide.adaptive.watch import PATIENT, Watch
from lowtide.errors import LowtideError, PolicyError, RescueError
from lowtide.operators.kinds import LayerKind
from lowtide.operators.layers import find_layers
from lowtide.planner.pipeline import Pipeline, even_pipeline
from lowtide.planner.plan import Plan
from lowtide.planner.simulation import Simulation
from lowtide.policy import Policy
from lowtide.runtime.apply import Handle, apply
from lowtide.runtime.follower import Structure
from lowtide.trace.trace import kernels_of

__all__ = ["Adaptive"]

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

FIRST_MEASURED = 2
"""The first step makes the optimizer's states, and is not like the others."""
UNCALLED = 3
"""Steps in which the model was not called before that is said."""
FRUITLESS = 5
"""Steps that could not be measured before it is given up."""

_RUNS: WeakSet[Adaptive] = WeakSet()
"""Those that were not removed. A model has one: of two, each would take the other's work for the model's."""


class _Ended(NamedTuple):
    """A step that has ended on the host; the device may still be at it."""

    number: int
    begin: Any
    end: Any
    peak: int
    phase: Phase
    rescued: int


class Adaptive:
    """An adaptive run. Give each step to :meth:`step`, or stand around the loop with ``with``."""

    def __init__(
        self,
        parts: Sequence[nn.Module],
        optimizers: Sequence[Optimizer] = (),
        settings: AdaptSettings | None = None,
        *,
        fixed: Policy | None = None,
        pipeline: Pipeline | None = None,
        stage: int = 0,
        layers: str | None = None,
        directory: Path | None = None,
        host_is_meant: bool = False,
        say: Callable[[str], None] = logger.info,
        report: Callable[[Plan], None] | None = None,
    ) -> None:
        self.parts, self.optimizers = tuple(parts), tuple(map(unwrapped, optimizers))
        for one in self.optimizers:
            if not isinstance(one, Optimizer):
                raise TypeError(f"adapt() takes optimizers of torch.optim, or one that is around such; found {one!r}")
        self.settings = settings or AdaptSettings()
        self.fixed, self.layers = fixed, layers
        self.host_is_meant = host_is_meant
        """Whether a model on the host, beside a device, is there on purpose."""
        self.clock = Clock(_device_of(self.parts))
        self.ranks = Ranks(stage)
        self.journal = Journal(
            directory,
            say,
            report,
            lambda: self.clock.capacity(),
            verbose=self.settings.verbose,
            first=self.ranks.first,
        )
        self.events, self.steps = self.journal.events, self.journal.steps
        counts = [len(find_layers(part, layers).modules) for part in self.parts]
        self.pipeline = pipeline or even_pipeline(sum(counts))
        self.chunks = self.pipeline.placement[stage]
        """The layers of each part, by their numbers in the whole model."""
        if [len(chunk) for chunk in self.chunks] != counts:
            raise PolicyError(
                f"the pipeline places {[len(chunk) for chunk in self.chunks]} layers on stage {stage} and the parts"
                f" there have {counts}"
            )
        self.total = sum(len(chunk) for place in self.pipeline.placement for chunk in place)
        self.fixed = fixed = fixed.for_layers(self.total) if fixed is not None else None
        if fixed is not None and len(fixed.layers) != self.total:
            raise PolicyError(f"the Policy decides {len(fixed.layers)} layers and the model has {self.total}")
        last = self.total - 1
        self.measuring = [
            Measuring(part, optimizers=self.optimizers, layers=layers, last=last in chunk)
            for part, chunk in zip(self.parts, self.chunks, strict=True)
        ]
        self.rescue: Rescue | None = None
        self.safe = safe_policy(self.total, fixed)
        self.policy = self.safe
        self.lengths = Lengths()
        self.plans: dict[int, Decided] = {}
        """What was decided for each length; 0 where batches have none."""
        self.before: dict[int, Decided] = {}
        """What was decided until that did not hold."""
        self.tokens = 0
        """Of the step that runs now."""
        self.measured = False
        """Whether it is a measured one."""
        self.decided: Decided | None = None
        """What was decided for it; None while the run is measured."""
        self.handles: list[Handle] = []
        self.kinds: list[dict[Structure, LayerKind]] = [{} for _ in self.parts]
        """What is known of the layers of each part."""
        self.number = 0
        """Steps that have ended."""
        self.watch = Watch(self.settings.error, self.settings.replan_every)
        self.safe_peak = 0
        """The most that was allocated in a step under the safe Policy."""
        self._begin: Any = None
        self._pending: _Ended | None = None
        self.own = OwnSteps(self)
        self._own_loop = False
        """Whether steps are somebody's own, so that nobody can repeat one."""
        self._in_call = False
        """Whether a step runs that was given to us."""
        self._called = False
        """Whether the model was called in it."""
        self._uncalled = self._fruitless = self._seen = 0
        self._compact = False
        """Whether the next step is to begin with memory as a plan has it."""
        replaced = [other for other in _RUNS if other._overlaps(self)]
        for other in replaced:
            other.remove()
        if replaced:
            self.say("warned", "an earlier adapt() of the same model or optimizer was removed: this one replaces it")
        self._make_rescue()
        self._loop = Loop(self.parts, self.optimizers, self)
        _RUNS.add(self)

    def _overlaps(self, other: Adaptive) -> bool:
        """Whether two runs have a module or an optimizer in common."""
        mine, theirs = (
            {id(one) for part in run.parts for one in part.modules()} | {id(one) for one in run.optimizers}
            for run in (self, other)
        )
        return not mine.isdisjoint(theirs)

    def _make_rescue(self) -> None:
        if not self.settings.rescue or self.clock.device.type == "cpu":
            return
        self.rescue = Rescue(
            self.parts[0] if len(self.parts) == 1 else nn.ModuleList(self.parts),
            self.optimizers,
            smallest=self.settings.smallest,
            multiple=self.settings.multiple,
            group=self.ranks.all.group,
            layers=self.layers if len(self.parts) == 1 else None,
        )
        self.rescue.arm()
        for handle in self.handles:
            self.rescue.follow(handle)

    def _locate(self) -> None:
        """Before the first step: the model may have been moved to its device since."""
        device = _device_of(self.parts)
        if device != self.clock.device and self.rescue is None:
            self.clock = Clock(device)
            self._make_rescue()
        if (
            self.settings.rescue
            and not self.host_is_meant
            and device.type == "cpu"
            and torch.accelerator.is_available()
        ):
            self.say(
                "warned",
                "the model is on the CPU, where nothing is rescued; move it to its device before its first step",
            )

    # Steps.

    def step(self, run: Callable[[], Result] | None = None, *, tokens: int | None = None) -> Result | None:
        """Run one whole training step: forward, backward and the optimizer's; it is repeated where it must be.

        ``run`` may be called again if memory ran out in it, so whatever it changes beside the model and its gradients,
        such as a data loader, stays outside. ``tokens`` says how long the step's micro batches are, where that is not
        always the same: then each length has its plan. Without ``run`` this says that a step of one's own has ended.
        """
        if run is None:
            self.own.end()
            return None
        self.own.break_off()
        self._own_loop = False
        if not self.number:
            self._locate()
        self._before(tokens or 0)
        self._start_clock()
        self._in_call, self._called = True, False
        try:
            attempts = self._attempts()
            if self.rescue is not None:
                result = self.rescue.run(run, attempts)
            else:
                with attempts():
                    result = run()
        except BaseException as error:
            self.take_off()
            if _refuses_hooks(error):
                raise RescueError(_NO_HOOKS) from error
            raise
        finally:
            self._in_call = False
        self._after()
        self.note_calls(self._called)
        return result

    def _attempts(self) -> Callable[[], AbstractContextManager[None]]:
        """What is around a step; one that is begun anew has no Policy: what a layer recomputes could not leave."""
        begun = False

        @contextmanager
        def attempt() -> Iterator[None]:
            nonlocal begun
            if begun:
                self._use(None)
            begun = True
            with ExitStack() as stack:
                for listening in self._prepared(stack):
                    stack.enter_context(listening())
                yield

        return attempt

    def _prepared(self, stack: ExitStack) -> list[Callable[[], AbstractContextManager[None]]]:
        """Prepare the model for being measured, if it is to be; what has to be entered when it is called."""
        return [stack.enter_context(one.prepared()) for one in self.measuring] if self.measured else []

    def _before(self, tokens: int) -> None:
        self._settle()
        self.tokens = self.ranks.largest(tokens) if tokens else 0
        for one in self.measuring:
            one.timed = 1 if tokens else TIMED_STEPS  # two batches of one length may never come
        self.measured = self._is_measured()
        self.decided = None if self.measured or self._measuring else self._planned()
        if self.decided is not None:
            self._use(self.decided.policy)
        else:
            self._use(None if self.measured else self.safe)
        if self.rescue is not None:
            self._arm(self.rescue)

    def _start_clock(self) -> None:
        self.clock.reset_peak()
        self._begin = self.clock.now()

    def _arm(self, rescue: Rescue) -> None:
        """Watch every operator where the step could not be repeated, or where memory is known to be short."""
        decided = self.decided
        scarce = decided is None or decided.policy is None or decided.scarce or self._bucket in self.watch.lacking
        (rescue.arm if scarce or not self._can_repeat else rescue.disarm)()
        rescue.watermark = decided.budget if decided is not None and decided.plan.feasible else None

    @property
    def _can_repeat(self) -> bool:
        """Whether this process can repeat a step that failed, so that nothing has to be armed for that."""
        return self.ranks.all.alone and not self._own_loop

    @property
    def _bucket(self) -> int:
        """The length that this step is planned as; 0 where batches have none."""
        return self.lengths.bucket(self.tokens) if self.tokens else 0

    @property
    def _measuring(self) -> bool:
        """Whether these are still the first steps."""
        return self.number < self.settings.profiling_steps or not self.lengths.traces

    def _is_measured(self) -> bool:
        if self.number + 1 < min(FIRST_MEASURED, self.settings.profiling_steps) or self._fruitless >= FRUITLESS:
            return False
        return self.lengths.wanted(self.tokens) if self.tokens else not self.lengths.traces

    def _after(self) -> None:
        self.number += 1
        rescued = self._count_rescues()
        peak = self.clock.peak_reserved()
        phase: Phase = "measuring" if self.decided is None else "planned"
        self._pending = _Ended(self.number, self._begin, self.clock.now(), peak, phase, rescued)
        if self.measured:
            self._look()
        elif self.decided is None:
            self.safe_peak = max(self.safe_peak, self.clock.peak_allocated()) if self.number > 1 else 0
        elif self.decided.policy is not None:
            self._watch(self.decided.plan.simulation, peak)

    def _settle(self) -> None:
        """Write down the last step, whose end the device has reached by now."""
        if self._pending is None:
            return
        number, begin, end, peak, phase, rescued = self._pending
        self._pending = None
        self.journal.ended(AdaptStep(number, self.clock.seconds(begin, end), peak, phase, rescued))

    def _count_rescues(self) -> int:
        if self.rescue is None:
            return 0
        counts = self.rescue.counts.taken()
        if counts.any:
            if self.decided is not None and self.decided.policy is not None:
                self.watch.missed(self._bucket, self.number, counts.missing)
            self.say("repeated" if counts.repeated else "rescued", "; ".join(counts.reasons[:3]))
        return counts.retried + counts.repeated + counts.watermark

    # What was measured.

    def _look(self) -> None:
        """A measured step has ended: take its Trace if it is complete."""
        seen = sum(len(one.recorded) + (one.survey is not None) for one in self.measuring)
        self._fruitless = 0 if seen != self._seen else self._fruitless + 1
        self._seen = seen
        if self._fruitless == FRUITLESS:
            self.say(
                "warned",
                f"{FRUITLESS} steps could not be measured: in none of them the model's forward and backward were seen,"
                " or hooks of your own held what it saved; no plan is made",
            )
        if not all(one.complete for one in self.measuring):
            return
        trace = self.ranks.trace([one.trace() for one in self.measuring], self.pipeline)
        self.lengths.add(self.tokens, trace)
        words = f" of {self.tokens} tokens" if self.tokens else ""
        self.say("measured", f"a step{words} was measured: {len(trace.parts)} kinds of layers")
        self.journal.measured(trace)
        for one, kinds in zip(self.measuring, self.kinds, strict=True):
            kinds |= one.kinds()
            one.begin_anew()
        self._seen = -1

    # The plan.

    def _planned(self) -> Decided:
        """What was decided for batches like this one; decide it, if that is new."""
        bucket = self._bucket
        found = self.plans.get(bucket)
        if found is None:
            found = self.plans[bucket] = self._decide(bucket)
        return found

    def _decide(self, bucket: int) -> Decided:
        """Make a plan of what was measured, on the first rank, for all of them."""
        self._use(None)
        if not self.plans or bucket in self.watch.lost:
            self._compact_once()
        trace = self.lengths.trace(bucket)
        assert trace is not None
        capacity = self.clock.capacity()
        situation = Situation(
            trace=trace,
            device=link_of(self.clock.device, kernels_of(trace)),
            pipeline=self.pipeline,
            capacity=None if capacity is None else self.ranks.smallest(capacity),
            fixed=self.fixed,
            safe_peak=self.ranks.largest(self.safe_peak) if not bucket else 0,
            lost=self.ranks.largest(self.watch.lost.get(bucket, 0)),
            before=self.before.get(bucket),
            watching=0.0 if self.rescue is None or self._can_repeat else self.rescue.seconds_per_operator(),
        )
        decided: Decided | None = None
        failed: LowtideError | None = None
        if self.ranks.first:
            try:
                decided = decide(situation, self.settings, rescued=self.rescue is not None)
            except LowtideError as error:
                failed = error
        if (failed := self.ranks.all.from_first(failed)) is not None:
            raise failed
        agreed = self.ranks.decided(decided)
        self.watch.planned(bucket, self.number)
        words = f" for {bucket} tokens" if bucket else ""
        policy = f": Policy {agreed.policy.digest[:12]}" if agreed.policy is not None else ""
        self.say("switched", f"{agreed.reason}{words}{policy}")
        self.journal.planned(agreed, shown=len(self.plans) < 2)
        return agreed

    @property
    def plan(self) -> Plan | None:
        """The last plan that was made."""
        return self.journal.plan

    def _compact_once(self) -> None:
        """Begin the next step with memory as a plan has it: when its first forward begins, old gradients are gone."""
        if self.rescue is None:
            self.clock.empty_cache()  # segments of the steps before have other sizes
        else:
            self._compact = True

    def _use(self, policy: Policy | None) -> None:
        """Put a Policy to work in place of the one that is, or none."""
        if self.handles:
            if policy == self.policy:
                return
            for place, handle in enumerate(self.handles):
                if self.rescue is not None:
                    self.rescue.unfollow(handle)
                handle.remove()
                self.kinds[place] |= handle.profiles
            self.handles = []
        if policy is None:
            return
        self.policy = policy
        whole = len(self.parts) == 1 and self.pipeline.stages == 1
        for place, (part, chunk) in enumerate(zip(self.parts, self.chunks, strict=True)):
            mine = replace(policy, layers=tuple(policy.layers[layer] for layer in chunk))
            handle = apply(part, mine, layers=self.layers, allow_unmatched=not whole, profiles=self.kinds[place])
            self.handles.append(handle)
            if self.rescue is not None:
                self.rescue.follow(handle)

    # Watching.

    def _watch(self, simulation: Simulation, peak: int) -> None:
        """Compare a step with its plan; make another where it is not what was planned."""
        bucket, planned, words = self._bucket, simulation.reserved, "reserved"
        if bucket:  # segments that batches of other lengths took stay until the device asks for them back
            peak, planned, words = self.clock.peak_allocated(), simulation.peak, "allocated"
        reason = self.watch.wrong(bucket, peak, planned, words)
        wanted = self.watch.may_replan(self.number)
        if self.ranks.all.alone:
            wanted = wanted and bool(reason)
        else:  # ranks ask each other now and then, not in every step: all of them in the same
            wanted = wanted and self.number % PATIENT == 0 and self.ranks.all.any_of([bool(reason)])[0]
        if wanted:
            self.say("replanned", reason or "another rank asked for it")
            self.watch.replans += 1
            self.before[bucket] = self.plans.pop(bucket)

    # Words.

    def say(self, kind: Kind, text: str) -> None:
        self.journal.note(self.number, kind, text)

    @property
    def record(self) -> AdaptRecord:
        """What happened so far."""
        return self.journal.record

    # Somebody's own loop.

    def __enter__(self) -> Adaptive:
        self.own.ended_by_optimizers = self._own_loop = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.remove()
        except RescueError as remaining:
            if error is None:
                raise
            error.add_note(str(remaining))  # what ended the loop is what its caller has to know
        if error is not None and _refuses_hooks(error):
            raise RescueError(_NO_HOOKS) from error

    def prepare(self) -> None:
        """Be ready for the next step of somebody's own loop."""
        self.own.prepare()

    def prepare_own_step(self, stack: ExitStack) -> list[Callable[[], AbstractContextManager[None]]]:
        """Decide what the next step is; what is around it, if it is measured, as :meth:`_prepared` has it."""
        self._before(0)
        return self._prepared(stack)

    def begin_own_step(self, running: ExitStack) -> None:
        """It begins: watch over it, below all that is on already. See [Note: the bottom of the stacks]."""
        self._own_loop = True
        if not self.number:
            self._locate()
        if self.rescue is not None:
            running.enter_context(self.rescue.watching())
        self._start_clock()

    def end_own_step(self) -> None:
        """It has ended."""
        self._after()

    def model_begins(self) -> None:
        """A part of the model is called, with gradients."""
        self._called = True
        if self._compact and self.rescue is not None:
            self._compact = False
            self.rescue.pager.compact()
        if not self._in_call:
            self.own.model_begins()

    def optimizer_begins(self) -> None:
        """An optimizer's step begins."""
        for one in self.measuring:
            one.optimizer_begins()

    def optimizer_ends(self) -> None:
        """An optimizer's step has ended."""
        for one in self.measuring:
            one.optimizer_ends()

    def optimizers_ended(self) -> None:
        """Every optimizer has stepped."""
        if not self._in_call:
            self.own.optimizers_ended()

    def take_off(self) -> None:
        """Take off whatever is on for a step; an interrupt may have left some of it."""
        for one in self.measuring:
            one.take_off()
        if self.rescue is not None:
            self.rescue.end_step()

    def note_calls(self, called: bool) -> None:
        """Say so where steps pass by the model that we were given."""
        self._uncalled = 0 if called else self._uncalled + 1
        if self._uncalled == UNCALLED:
            path = find_layers(self.parts[0], self.layers).path.split(".")
            inner = f", such as its {path[0]!r}" if path[0] else ""
            self.say(
                "warned",
                f"the loop has not called the {type(self.parts[0]).__name__} that adapt() was given in {UNCALLED}"
                f" steps, so nothing is measured or planned: pass the module that it calls{inner}",
            )

    def remove(self) -> None:
        """Leave the model as it was.

        RescueError if there is no room for what is on the host: free memory of the device and call this again.
        """
        self.own.break_off()
        self._loop.remove()
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


_NO_HOOKS = (
    "a step computes gradients by torch.func, which allows no saved-tensor hooks, and adapt() has some on while it"
    " measures and where memory is short; compute them by torch.autograd, or use lowtide.apply with a Policy"
)


def _refuses_hooks(error: BaseException) -> bool:
    """Whether torch has refused to go on because of our hooks."""
    return isinstance(error, RuntimeError) and "support saved tensor hooks" in str(error)


def _device_of(parts: Sequence[nn.Module]) -> torch.device:
    """The accelerator that a model is on, though some of it may be on the host; the host if none of it is."""
    devices = [one.device for part in parts for one in part.parameters()]
    return next((one for one in devices if one.type not in ("cpu", "meta")), torch.device("cpu"))

"""The plans of a run: one for each length of batches, made by the first rank and monitored on all."""

from __future__ import annotations

from lowtide.adaptive.clock import Clock
from lowtide.adaptive.decide import Decided, Situation, decide
from lowtide.adaptive.journal import Journal
from lowtide.adaptive.machine import profile_device
from lowtide.adaptive.plan_monitor import QUERY, PlanMonitor
from lowtide.adaptive.ranks import Ranks
from lowtide.adaptive.settings import AdaptSettings
from lowtide.adaptive.suspicion import Suspicion
from lowtide.errors import LowtideError
from lowtide.planner.pipeline import Pipeline
from lowtide.planner.simulation import Simulation
from lowtide.policy import Policy
from lowtide.trace.trace import Trace, kernels_of

__all__ = ["Planning"]


class Planning:
    """Makes plans, and drops those that do not hold. Lengths are 0 where batches have none."""

    def __init__(
        self, settings: AdaptSettings, ranks: Ranks, pipeline: Pipeline, fixed: Policy | None, journal: Journal
    ) -> None:
        """``fixed`` holds decisions that no plan changes."""
        self.settings, self.ranks, self.pipeline, self.fixed, self.journal = settings, ranks, pipeline, fixed, journal
        self.plans: dict[int, Decided] = {}
        """What was decided for each length."""
        self._others: dict[int, int] = {}
        """What this process had on the device besides the model when the plan of each length was made, in bytes."""
        self._begun_with: dict[int, int] = {}
        """What was allocated when the first step of each plan began."""
        self.replaced: dict[int, Decided] = {}
        """What was decided for it before the last re-plan."""
        self.monitor = PlanMonitor(settings.error, settings.replan_every)
        self.suspicion = Suspicion()
        self.safe_peak = 0
        """The most bytes that were allocated in a step under the safe Policy."""

    def safe_step_ended(self, step: int, clock: Clock) -> None:
        """A step under the safe Policy has ended; the first one is not like the others."""
        self.safe_peak = max(self.safe_peak, clock.ended_with.peak_allocated) if step > 1 else 0

    def wants_compact_memory(self, length: int) -> bool:
        """Whether a new plan of this length should begin with compacted memory: the first, and after an OOM."""
        return not self.plans or length in self.monitor.lost

    def make(self, step: int, length: int, trace: Trace, clock: Clock, *, rescued: bool, others: int) -> None:
        """Make the plan of a length after a step, on the first rank, for all ranks.

        ``rescued`` says whether there is a rescue, and ``others`` how many bytes this process has on the device besides
        the model, such as another model's. Where the plan fails on the first rank, every rank raises its error.
        """
        capacity = clock.capacity()
        situation = Situation(
            trace=trace,
            device=profile_device(clock.device, kernels_of(trace)),
            pipeline=self.pipeline,
            capacity=None if capacity is None else self.ranks.smallest(capacity),
            fixed=self.fixed,
            safe_peak=self.ranks.largest(self.safe_peak) if not length else 0,
            lost=self.ranks.largest(self.monitor.lost.get(length, 0)),
            before=self.replaced.get(length),
        )
        decided: Decided | None = None
        failed: LowtideError | None = None
        if self.ranks.first:
            try:
                decided = decide(situation, self.settings, rescued=rescued)
            except LowtideError as error:
                failed = error
        if (failed := self.ranks.all.from_first(failed)) is not None:
            raise failed
        agreed = self.ranks.decided(decided)
        self.monitor.planned(length, step)
        self.suspicion.planned(length)
        words = f" for {length} tokens" if length else ""
        policy = f": Policy {agreed.policy.digest[:12]}" if agreed.policy is not None else ""
        self.journal.note(step, "switched", f"{agreed.reason}{words}{policy}")
        self.journal.planned(agreed, shown=len(self.plans) < 2)
        self.plans[length], self._others[length] = agreed, others
        self._begun_with.pop(length, None)

    def others(self, length: int, clock: Clock) -> int:
        """The bytes that this process has on the device besides the model, in the step that runs or has just ended."""
        first = self._begun_with.setdefault(length, clock.begun_with)
        return max(0, self._others.get(length, 0) + clock.begun_with - first)

    def compare(self, step: int, length: int, simulation: Simulation, clock: Clock) -> None:
        """Compare a step with its plan, and drop the plan if it does not hold: the next such step makes another."""
        planned = simulation.peak + self.others(length, clock)
        reason = self.monitor.wrong(length, clock.ended_with.peak_allocated, planned)
        wanted = bool(reason)
        if not self.ranks.all.alone:  # ranks ask each other every few steps, all of them in the same step
            if step % QUERY:
                return
            watched = step < self.suspicion.until
            wanted, watched = self.ranks.all.any_of([wanted, watched])
            if watched:
                self.suspicion.all_ranks(step)
        if wanted and self.monitor.may_replan(step):
            self.journal.note(step, "replanned", reason or "another rank asked for it")
            self.monitor.replans += 1
            self.replaced[length] = self.plans.pop(length)

"""The plans of a run: one for each bucket of batches, made by the first rank and monitored on all.

A bucket is the shape that a batch is planned as: see [Note: batches of different shapes]. A run's first plan is waited
for, and so is one in place of a plan that did not hold. Plans for further buckets are made in the background; until one
arrives, batches run under the plan of a larger bucket, or the safe Policy.

[Note: ranks with batches of different shapes]
Where layers communicate in forward, as sharded and parallel ones do, all ranks must run the same Policy. They agree at
the model's door, where all of them come in every step, or they would wait for each other in the layers. Elsewhere, as
with copies of the model, a rank may skip the model in a step: then each rank chooses by itself, and plans by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from lowtide.adaptive.background import BackgroundPlanner
from lowtide.adaptive.clock import Clock
from lowtide.adaptive.decide import Decided, Situation, decide
from lowtide.adaptive.journal import Journal
from lowtide.adaptive.lengths import Lengths, Shape, covers, format_shape
from lowtide.adaptive.machine import host_links, profile_device
from lowtide.adaptive.model_parts import ModelParts
from lowtide.adaptive.plan_monitor import QUERY, PlanMonitor
from lowtide.adaptive.ranks import Ranks
from lowtide.adaptive.settings import AdaptSettings
from lowtide.adaptive.suspicion import Suspicion
from lowtide.cost.links import Links
from lowtide.errors import LowtideError
from lowtide.policy import Policy
from lowtide.trace.trace import Trace, kernels_of

__all__ = ["Planning"]


class Planning:
    """Makes plans, and drops those that do not hold."""

    def __init__(
        self,
        settings: AdaptSettings,
        ranks: Ranks,
        lengths: Lengths,
        model: ModelParts,
        fixed: Policy | None,
        journal: Journal,
    ) -> None:
        """``fixed`` holds decisions that no plan changes."""
        self.settings, self.ranks, self.lengths, self.journal = settings, ranks, lengths, journal
        self.model, self.fixed = model, fixed
        self._own = Ranks(alone=True)
        self.plans: dict[Shape, Decided] = {}
        """What was decided for each bucket."""
        self.background = BackgroundPlanner()
        self._asked: set[Shape] = set()
        """The buckets whose plans the background was asked for."""
        self._ahead: list[Shape] = []
        """Buckets that batches may come to be in, the largest last."""
        self._ahead_of = 0
        """The number of measured shapes that they follow from."""
        self._arrived: dict[Shape, Decided | None] = {}
        """Plans of the background that are not in use yet."""
        self._others: dict[Shape, int] = {}
        """What this process had on the device besides the model when the plan of each bucket was made, in bytes."""
        self._begun_with: dict[Shape, int] = {}
        """What was allocated when the first step of each plan began."""
        self.replaced: dict[Shape, Decided] = {}
        """What was decided for it before the last re-plan."""
        self.monitor = PlanMonitor(settings.error, settings.replan_every)
        self.suspicion = Suspicion()
        self.safe_peak = 0
        """The most bytes that were allocated in a step under the safe Policy."""
        self._links: Links | None = None
        """Measured before the first plan."""
        self._capacity: int | None = None
        """The least of all ranks' when they last agreed on it."""
        self._wrong = ""
        """Why the plan of the step that has just ended does not hold; empty if it does."""
        self._room = ""
        """Why it may give way to a faster one; empty if it may not."""

    @property
    def is_shared(self) -> bool:
        """Whether all ranks are under the same plan in every step."""
        return self.ranks.all.alone or not self.lengths.vary or self.lengths.communicate

    @property
    def peers(self) -> Ranks:
        """The ranks that are under the same plan as this one."""
        return self.ranks if self.is_shared else self._own

    def safe_step_ended(self, step: int, clock: Clock) -> None:
        """A step under the safe Policy has ended; the first one is not like the others."""
        self.safe_peak = max(self.safe_peak, clock.ended_with.peak_allocated) if step > 1 else 0

    def wants_compact_memory(self, bucket: Shape) -> bool:
        """Whether a new plan of this bucket should begin with compacted memory: the first, and after an OOM."""
        return not self.plans or bucket in self.monitor.lost

    def find(self, bucket: Shape) -> Shape | None:
        """The bucket whose plan a batch can run under now: its own, or a larger one; None if there is none."""
        if bucket in self.plans:
            return bucket
        larger = [one for one, decided in self.plans.items() if covers(one, bucket) and decided.policy is not None]
        return min(larger, key=prod, default=None)

    # In the foreground.

    def is_waited_for(self, bucket: Shape, *, in_background: bool) -> bool:
        """Whether the next step waits for the plan of this bucket."""
        if bucket in self.plans or (self.plans and bucket not in self.replaced and in_background):
            return False
        return self.lengths.trace(bucket) is not None

    def make(self, step: int, bucket: Shape, clock: Clock, *, rescued: bool, others: int) -> None:
        """Make the plan of a bucket after a step, on the first rank, for all ranks that share it.

        ``rescued`` says whether there is a rescue, and ``others`` how many bytes this process has on the device besides
        the model, such as another model's. Where the plan fails on the first rank, every rank raises its error.
        """
        trace = self.lengths.trace(bucket)
        assert trace is not None
        capacity, peers = clock.capacity(), self.peers
        self._capacity = None if capacity is None else peers.smallest(capacity)
        safe_peak, lost = peers.largest(self.safe_peak), peers.largest(self.monitor.lost.get(bucket, 0))
        theirs = peers.largest(others)
        decided: Decided | None = None
        failed: LowtideError | None = None
        if peers.first:
            situation = self._situation(bucket, trace, clock, theirs, safe_peak if not self.lengths.vary else 0, lost)
            try:
                decided = decide(situation, self.settings, rescued=rescued)
            except LowtideError as error:
                failed = error
        if (failed := peers.all.from_first(failed)) is not None:
            raise failed
        self._planned(step, bucket, peers.decided(decided), others)

    def _situation(
        self, bucket: Shape, trace: Trace, clock: Clock, others: int, safe_peak: int = 0, lost: int = 0
    ) -> Situation:
        self._links = self._links or host_links(clock.device)
        return Situation(
            trace=trace,
            device=profile_device(clock.device, kernels_of(trace), links=self._links),
            pipeline=self.model.pipeline,
            capacity=clock.capacity() if self.peers.all.alone else self._capacity,
            fixed=self.fixed,
            safe_peak=safe_peak,
            others=others,
            lost=lost,
            before=self.replaced.get(bucket),
            on_host=clock.device.type == "cpu",
            one_graph=self.model.is_one_graph,
        )

    def _planned(self, step: int, bucket: Shape, decided: Decided, others: int) -> None:
        self.monitor.planned(bucket, step, decided.capacity)
        self.suspicion.planned(bucket)
        words = f" for batches of {format_shape(bucket)}" if self.lengths.vary else ""
        policy = f": Policy {decided.policy.digest[:12]}" if decided.policy is not None else ""
        self.journal.note(step, "switched", f"{decided.reason}{words}{policy}")
        self.journal.planned(decided, shown=len(self.plans) < 2)
        self.plans[bucket], self._others[bucket] = decided, others
        self._begun_with.pop(bucket, None)
        self.replaced.pop(bucket, None)  # a plan is large

    # In the background.

    def ask(self, bucket: Shape, clock: Clock, *, rescued: bool, others: Callable[[], int]) -> None:
        """Let the plan of a bucket be made in the background; when there is nothing else to do, those around it.

        ``others`` counts the bytes that this process has on the device besides the model.
        """
        if not self.peers.first:
            return
        if self._ahead_of != len(self.lengths.traces):
            self._ahead, self._ahead_of = list(self.lengths.between()), len(self.lengths.traces)
        while bucket in self.plans or bucket in self._asked:
            if self.background.waiting or not self._ahead:
                return
            bucket = self._ahead.pop()
        self._asked.add(bucket)
        if (trace := self.lengths.trace(bucket)) is not None:
            situation = self._situation(bucket, trace, clock, others())
            self.background.ask(bucket, situation, self.settings, rescued=rescued)

    def have_arrived(self) -> bool:
        """Whether plans have arrived from the background, on the first rank."""
        if self.background.waiting:
            self._arrived |= self.background.arrived()
        return bool(self._arrived)

    def take_arrived(self, step: int, others: int) -> None:
        """Use the plans that have arrived on the first rank, on all ranks that share them."""
        peers = self.peers
        arrived, self._arrived = peers.all.from_first(self._arrived), {}
        for bucket, decided in arrived.items():
            if decided is not None and bucket not in self.plans:
                self._planned(step, bucket, peers.decided(decided), others)

    # While steps run.

    def others(self, bucket: Shape, clock: Clock) -> int:
        """The bytes that this process has on the device besides the model, in the step that runs or has just ended."""
        first = self._begun_with.setdefault(bucket, clock.begun_with)
        return max(0, self._others.get(bucket, 0) + clock.begun_with - first)

    def compare(self, step: int, bucket: Shape, decided: Decided, clock: Clock) -> None:
        """Compare the step that has just ended with its plan."""
        if decided.policy is not None:
            planned = decided.plan.simulation.peak + self.others(bucket, clock)
            self._wrong = self.monitor.wrong(bucket, clock.ended_with.peak_allocated, planned)
        if not decided.keeps_everything:
            bound_by_device = self.settings.budget is None or decided.budget < self.settings.budget
            self._room = self.monitor.has_room(bucket, step, clock.capacity() if bound_by_device else None)

    def step_ended(self, step: int, bucket: Shape, *, unlike: bool) -> bool:
        """Drop the plan of the step that has ended if it does not hold, or if there is room for a faster one: the next
        such step makes another.

        ``unlike`` says that batches were unlike those that were measured; returned is whether they were on any rank.
        """
        reason, room = self._wrong, self._room
        self._wrong = self._room = ""
        wanted, short = bool(reason), not room
        if not self.ranks.all.alone:  # ranks ask each other every few steps, all of them in the same step
            due = step % QUERY == 0
            watched = due and step < self.suspicion.until
            flags = self.ranks.all.any_of([wanted, short, watched, unlike]) if due else [False, True, False, False]
            if self.is_shared:
                wanted, short = flags[:2]
            watched, unlike = flags[2:]
            if watched:
                self.suspicion.all_ranks(step)
        if bucket in self.plans and (wanted or not short) and self.monitor.may_replan(step):
            if not wanted:
                self.monitor.forgive(bucket)
            self.journal.note(step, "replanned", reason or room or "another rank asked for it")
            self.monitor.replans += wanted
            self.replaced[bucket] = self.plans.pop(bucket)
        return unlike

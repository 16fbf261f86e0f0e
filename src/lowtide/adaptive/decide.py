"""From a Trace to a decision: the budget, the plan, and what is done where nothing fits. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from lowtide.adaptive.settings import AdaptSettings
from lowtide.cost.device import Device
from lowtide.planner.cache import clear_caches
from lowtide.planner.make import make_plan
from lowtide.planner.pipeline import Pipeline
from lowtide.planner.plan import UNBOUNDED, Plan
from lowtide.planner.simulate import simulate
from lowtide.policy import LayerPolicy, Policy, Recompute
from lowtide.trace.trace import Trace
from lowtide.units import format_bytes

__all__ = ["Decided", "Situation", "decide", "safe_policy"]

SEGMENT = 2 << 20
"""The bytes of a caching allocator's segment for small tensors: a plan may be off by one segment."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What is known when a plan is made."""

    trace: Trace
    """The measured Trace of the whole model."""
    device: Device
    pipeline: Pipeline
    capacity: int | None
    """Bytes of the device that this process can have, the least of all ranks; None where the device does not say."""
    fixed: Policy | None = None
    """The user's own decisions."""
    safe_peak: int = 0
    """The most bytes that were allocated in a step under the safe Policy."""
    others: int = 0
    """Bytes that this process has on the device besides the model, such as another model's."""
    lost: int = 0
    """Bytes that were missing in OOMs under earlier plans."""
    before: Decided | None = None
    """What was decided before these OOMs."""
    on_host: bool = False
    """Whether the model is on the CPU: what is swapped to the host has not left it then."""
    one_graph: bool = False
    """Whether the model is compiled as a whole: a graph has no place for swaps."""


@dataclass(frozen=True, kw_only=True)
class Decided:
    """A decision about the following steps."""

    plan: Plan
    policy: Policy | None
    """The plan's, or the safe one; None where nothing fits and only the rescue can get a step through: without a Policy
    everything that is saved can be offloaded on OOM, which takes less memory than any Policy."""
    budget: int
    reason: str
    """One sentence for the user."""
    scarce: bool = False
    """Whether OOM is likely, so that the rescue should stay armed."""
    capacity: int | None = None
    """What the device gave when it was decided."""

    @cached_property
    def keeps_everything(self) -> bool:
        """Whether no Policy could be faster."""
        return self.policy is not None and all(one == LayerPolicy() for one in self.policy.layers)


def safe_policy(layers: int, fixed: Policy | None = None) -> Policy:
    """Every layer recomputed, except where ``fixed`` decides something else."""
    recomputed = LayerPolicy(default=Recompute())
    if fixed is None:
        return Policy((recomputed,) * layers, origin="solver")
    return replace(fixed, layers=tuple(recomputed if one == LayerPolicy() else one for one in fixed.layers))


def decide(situation: Situation, settings: AdaptSettings, *, rescued: bool = True) -> Decided:
    """The fastest Policy within the budget.

    A budget from the user bounds the plan, not the device: where nothing fits it, every layer is recomputed. A run that
    has survived so far is not stopped. If nothing fits the device itself, the reason says how much would be enough, and
    there is no Policy, since the rescue can offload more than any Policy; if the run is not ``rescued``, every layer is
    recomputed. After OOMs that leave too little for any plan, the run goes on with the Policy that takes least.
    """
    try:
        return replace(_decided(situation, settings, rescued=rescued), capacity=situation.capacity)
    finally:
        clear_caches()


def _decided(situation: Situation, settings: AdaptSettings, *, rescued: bool) -> Decided:
    trace, device, pipeline = situation.trace, situation.device, situation.pipeline
    safe = safe_policy(len(trace.layers), situation.fixed)
    margin = _margin(situation, safe)
    room = None if situation.capacity is None else max(1, situation.capacity - margin)
    asked = settings.budget
    budget = min(one for one in (asked, room) if one is not None) if asked or room else UNBOUNDED
    swap = settings.swap and not situation.on_host and not situation.one_graph
    plan = make_plan(trace, budget, device, pipeline, swap=swap, fixed=_fixed(situation.fixed))
    if plan.feasible:
        within = (
            f"for {format_bytes(budget)}" if plan.bounded else "without a budget: the device does not say what it has"
        )
        reason = f"{len(trace.layers)} layers planned {within}"
        return Decided(plan=plan, policy=plan.policy, budget=budget, reason=reason)
    least = f"the least is {format_bytes(plan.least)}"
    if room is None or plan.least <= room:
        reason = f"nothing fits the device size of {format_bytes(budget)}, {least}: every layer is recomputed"
        return Decided(plan=plan, policy=safe, budget=budget, reason=reason)
    if situation.lost:
        before = situation.before
        if before is not None and before.policy is not None and before.plan.simulation.reserved <= plan.least:
            plan, policy = before.plan, before.policy
        else:
            policy = plan.policy
        reason = f"what was missing leaves {format_bytes(budget)}, too little for any plan: the Policy that takes least"
        return Decided(plan=plan, policy=policy, budget=budget, reason=reason, scarce=True)
    enough = plan.least + margin + SEGMENT  # another measurement may differ a little
    what = "tensors are offloaded on OOM" if rescued else "every layer is recomputed"
    reason = (
        f"the device gives this process {format_bytes(situation.capacity or 0)}, too little for any plan: even the"
        f" Policy that needs least takes {format_bytes(plan.least)}, and {format_bytes(margin)} are left free; {what}."
        f" A capacity of {format_bytes(enough)} ({enough} bytes) works. {plan.notes[0]}"
    )
    return Decided(plan=plan, policy=None if rescued else safe, budget=budget, reason=reason)


def _margin(situation: Situation, safe: Policy) -> int:
    """What safe steps took beyond the simulator's prediction, or what else is there, and what has been missing since.

    The simulator replays the allocator, so the plan itself includes fragmentation. The reserved bytes do not measure it
    while a run switches Policies: segments of other sizes stay until the device asks for them back.
    """
    if situation.capacity is None:
        return 0
    predicted = simulate(situation.trace, safe, situation.device, situation.pipeline).peak
    return max(0, situation.safe_peak - predicted, situation.others) + SEGMENT + situation.lost


def _fixed(fixed: Policy | None) -> Policy | None:
    """None for a Policy that decides nothing: it fixes nothing, and the planner may look further."""
    return None if fixed is None or all(one == LayerPolicy() for one in fixed.layers) else fixed

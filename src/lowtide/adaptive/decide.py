"""From what was measured to what is done: the budget, the plan, and what holds where nothing fits. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from lowtide.adaptive.settings import AdaptSettings
from lowtide.cost.device import Device
from lowtide.planner.make import make_plan
from lowtide.planner.pipeline import Pipeline
from lowtide.planner.plan import Plan
from lowtide.planner.simulate import simulate
from lowtide.policy import LayerPolicy, Policy, Recompute
from lowtide.trace.trace import Trace
from lowtide.units import format_bytes, format_seconds

__all__ = ["Decided", "Situation", "decide", "safe_policy"]

SEGMENT = 2 << 20
"""What a caching allocator takes from the device for small tensors: a plan may be off by one."""

WATCHED = "every operator is watched for want of memory"


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What is known when a plan is made."""

    trace: Trace
    """The whole model, as it was measured."""
    device: Device
    pipeline: Pipeline
    capacity: int | None
    """Bytes that this process can have of the device, the least of all ranks; None where the device does not say."""
    fixed: Policy | None = None
    """What a person decided."""
    safe_peak: int = 0
    """The most that was allocated in a step under the safe Policy."""
    lost: int = 0
    """Bytes that were missing since, where allocations failed."""
    before: Decided | None = None
    """What was decided until they were."""
    watching: float = 0.0
    """Seconds of the host for each operator, where all of them are watched from now on."""


@dataclass(frozen=True, kw_only=True)
class Decided:
    """What is done from now on."""

    plan: Plan
    policy: Policy | None
    """The plan's, or the safe one; None where nothing fits and only the rescue may bring a step through: then whatever
    is saved can leave when it must, which takes less memory than any Policy."""
    budget: int
    margin: int
    """What of the capacity was left free."""
    reason: str
    """In one sentence, for people."""
    scarce: bool = False
    """Whether memory may well be missing, so that the rescue should stay armed."""


def safe_policy(layers: int, fixed: Policy | None = None) -> Policy:
    """Every layer recomputed, but where a person decided something else."""
    again = LayerPolicy(default=Recompute())
    if fixed is None:
        return Policy((again,) * layers, origin="solver")
    return replace(fixed, layers=tuple(again if one == LayerPolicy() else one for one in fixed.layers))


def decide(
    situation: Situation,
    settings: AdaptSettings,
    progress: Callable[[str], None] = lambda _: None,
    *,
    rescued: bool = True,
) -> Decided:
    """The fastest Policy within the budget.

    A budget that a person gave bounds the plan and is no capacity: where nothing fits it everything is recomputed. A
    run that has come through so far is not stopped. If nothing fits the device itself, the reason says how much would
    be enough, and there is no Policy: the rescue can offload more than any; if the run is not ``rescued``, every layer
    is recomputed. Where memory was missing since, it goes on with what takes least.
    """
    decided = _decide(situation, settings, progress, rescued=rescued)
    if not situation.watching:
        return decided
    seconds = situation.watching * _operators(situation.trace, situation.pipeline)
    note = f"{WATCHED}: about {format_seconds(seconds)} of the host's time a step"
    others = [one for one in decided.plan.notes if not one.startswith(WATCHED)]  # of a plan that is used again
    plan = replace(decided.plan, notes=(*others, note))
    return replace(decided, plan=plan, reason=f"{decided.reason}; {note}")


def _decide(
    situation: Situation, settings: AdaptSettings, progress: Callable[[str], None], *, rescued: bool
) -> Decided:
    trace, device, pipeline = situation.trace, situation.device, situation.pipeline
    safe = safe_policy(len(trace.layers), situation.fixed)
    margin = _margin(situation, safe)
    room = None if situation.capacity is None else max(1, situation.capacity - margin)
    asked = settings.budget
    budget = min(one for one in (asked, room) if one is not None) if asked or room else 1 << 62
    plan = make_plan(
        trace, budget, device, pipeline, swap=settings.swap, fixed=_fixed(situation.fixed), progress=progress
    )
    if plan.feasible:
        reason = f"{len(trace.layers)} layers planned for {format_bytes(budget)}"
        return Decided(plan=plan, policy=plan.policy, budget=budget, margin=margin, reason=reason)
    least = f"the least is {format_bytes(plan.least)}"
    if room is None or plan.least <= room:
        reason = f"nothing fits the device size of {format_bytes(budget)}, {least}: every layer is recomputed"
        return Decided(plan=plan, policy=safe, budget=budget, margin=margin, reason=reason)
    if situation.lost:
        before = situation.before
        if before is not None and before.policy is not None and before.plan.simulation.reserved <= plan.least:
            plan, policy = before.plan, before.policy
        else:
            policy = plan.policy
        reason = f"what was missing leaves {format_bytes(budget)}, too little for any plan: the Policy that takes least"
        return Decided(plan=plan, policy=policy, budget=budget, margin=margin, reason=reason, scarce=True)
    enough = plan.least + margin + SEGMENT  # what is measured again there may differ a little
    what = "tensors leave as they must" if rescued else "every layer is recomputed"
    reason = (
        f"the device gives this process {format_bytes(situation.capacity or 0)}, too little for any plan: even the"
        f" Policy that needs least takes {format_bytes(plan.least)}, and {format_bytes(margin)} are left free; {what}."
        f" A capacity of {format_bytes(enough)} ({enough} bytes) works. {plan.notes[0]}"
    )
    return Decided(plan=plan, policy=None if rescued else safe, budget=budget, margin=margin, reason=reason)


def _operators(trace: Trace, pipeline: Pipeline) -> int:
    """How many kernels a rank runs in a step, as far as one is like the others."""
    inside = sum(len(trace.parts[place].kernels) for place in trace.layers) // max(1, pipeline.stages)
    outside = len(trace.before.kernels) + len(trace.after.kernels)
    return (inside + outside) * pipeline.micro_batches + len(trace.optimizer.kernels)


def _margin(situation: Situation, safe: Policy) -> int:
    """What safe steps took beyond what the simulator says of them, and what has been missing since.

    The simulator replays the allocator, so fragmentation is in the plan itself. What was reserved is no measure of it
    while a run changes its ways: segments of other sizes stay until the device asks for them back.
    """
    if situation.capacity is None:
        return 0
    predicted = simulate(situation.trace, safe, situation.device, situation.pipeline).peak
    return max(0, situation.safe_peak - predicted) + SEGMENT + situation.lost


def _fixed(fixed: Policy | None) -> Policy | None:
    """A Policy that decides nothing fixes nothing, and lets the planner look further."""
    return None if fixed is None or all(one == LayerPolicy() for one in fixed.layers) else fixed

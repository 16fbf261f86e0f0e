"""A Plan in words: the sentences that the terminal and the page both say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lowtide.planner.plan import Option, Plan
from lowtide.planner.simulation import Share, StageSimulation
from lowtide.policy import Keep, Recompute, Swap
from lowtide.units import format_bytes, format_seconds

__all__ = [
    "KINDS",
    "Decided",
    "Held",
    "decided",
    "decision_kind",
    "fullest",
    "headline",
    "held_by_decision",
    "layout",
    "peak_sentence",
    "policy_snippet",
    "recommended",
    "shares_by_kind",
    "shares_by_operator",
    "shown_options",
    "speed",
]

KINDS = ("keep", "recompute", "swap")
SHARES = ("parameters", "gradients", "optimizer", "activations", "boundaries", "crossing", "transients")
"""The kinds of share, what stays over the step first."""


class Held(NamedTuple):
    """The bytes of a micro-batch's activations, in all layers, by what becomes of them."""

    keep: int = 0
    recompute: int = 0
    swap: int = 0


class Decided(NamedTuple):
    """Operators of one name that are recomputed or swapped, in however many layers."""

    kind: str
    """``recompute`` or ``swap``."""
    name: str
    """The operator; empty for layers that are recomputed as a whole."""
    layers: int
    bytes: int
    """What they hold for backward in one micro-batch when they are kept, all layers together."""


def headline(plan: Plan) -> str:
    """Whether it fits, how fast it then is, and against what: one sentence."""
    reserved, budget = plan.simulation.reserved, format_bytes(plan.budget)
    within = f"fits in {budget}" if plan.bounded else "is planned without a budget"
    if not plan.feasible:
        least = plan.least or reserved
        return (
            f"{plan.model} does not fit in {budget}: the least that any policy needs is {format_bytes(least)},"
            f" {format_bytes(least - plan.budget)} more"
        )
    return (
        f"{plan.model} {within}: {format_bytes(reserved)} reserved,"
        f" {format_seconds(plan.simulation.seconds)} a step{_against(plan)}"
    )


_AS_FAST = ", as fast as with everything kept, which fits"


def _against(plan: Plan) -> str:
    """The comparison that says most: with keeping everything where that fits, else with recomputing every layer."""
    seconds = plan.simulation.seconds
    kept = next((one for one in plan.options if one.name == "keep everything"), None)
    full = next((one for one in plan.options if one.name == "recompute every layer"), None)
    if kept is not None and kept.fits:
        slower = seconds / kept.simulation.seconds - 1
        return f", {slower:.1%} slower than keeping everything, which fits too" if slower >= 0.0005 else _AS_FAST
    if full is not None and full.simulation.seconds > seconds * 1.0005:
        return f", {full.simulation.seconds / seconds - 1:.1%} faster than full activation checkpointing"
    return ""


def layout(plan: Plan) -> str:
    """What was planned for, in short: ``128 x h100, dp 8 sharded, 16 stages, 64 micro-batches of 1 x 4096 tokens``."""
    pipeline, work = plan.pipeline, plan.workload
    parts = [f"{work.devices} x {plan.device}" if work.devices else plan.device]
    if work.data > 1:
        sharded = work.layout.shard if work.layout is not None else 1
        how = "replicated" if sharded == 1 else "sharded" if sharded == work.data else f"sharded by {sharded}"
        parts.append(f"dp {work.data} {how}")
    if work.layout is not None:
        degrees = (("tp", work.layout.tensor), ("cp", work.layout.context), ("ep", work.layout.expert))
        parts += [f"{name} {degree}" for name, degree in degrees if degree > 1]
    if pipeline.stages > 1:
        chunks = f" x {pipeline.chunks} chunks" if pipeline.chunks > 1 else ""
        parts.append(f"pp {pipeline.stages}{chunks}, {pipeline.schedule.replace('_', ' ')}")
    count = pipeline.micro_batches
    size = f" of {work.samples} x {work.sequence} tokens" if work.sequence else ""
    size = size or (f" of {work.samples} sample{'s' if work.samples > 1 else ''}" if work.samples else "")
    parts.append(f"{count} micro-batch{'es' if count > 1 else ''}{size}")
    if work.dtype:
        parts.append(f"{work.dtype} parameters")
    if work.compute_dtype and work.compute_dtype != work.dtype:
        parts.append(f"{work.compute_dtype} compute")
    if work.dtype:
        parts.append(work.optimizer or "no optimizer")
    return ", ".join(parts)


def speed(plan: Plan) -> str:
    """How fast that is: ``61,440 tokens/s (7,680 a device), MFU 41.3%``; empty where the Trace does not say."""
    parts = []
    if (rate := plan.tokens_per_second) is not None:
        each = f" ({rate / plan.workload.devices:,.0f} a device)" if plan.workload.devices > 1 else ""
        parts.append(f"{rate:,.0f} tokens/s{each}")
    if plan.mfu is not None:
        parts.append(f"MFU {plan.mfu:.1%}")
    return ", ".join(parts)


def policy_snippet(file: str = "policy.json") -> str:
    """How the Policy in a file is used in Python."""
    return (
        "import lowtide\n\n"
        f'policy = lowtide.load_policy("{file}")\n'
        "handle = lowtide.apply(model, policy)  # then train as before\n"
        "print(handle.receipt())  # after a step: what was moved and freed\n"
    )


def fullest(plan: Plan) -> StageSimulation:
    """The stage that reserves most."""
    return max(plan.simulation.stages, key=lambda stage: stage.reserved)


def peak_sentence(plan: Plan) -> str:
    """Where the peak is."""
    stage = fullest(plan)
    several = len(plan.simulation.stages) > 1
    where = f"on stage {stage.stage}" if several else ""
    when = ""
    if stage.peak_at is not None:
        at = stage.peak_at
        layer = f"layer {at.layer}" if at.layer is not None else "outside the layers"
        # A stage among several has a clock of its own, which says nothing about the step.
        time = "" if several else f"{format_seconds(at.time)} into the step, "
        when = f"{time}{layer}" + (f", {at.operator}" if at.operator else "")
    batches = f"{stage.in_flight} micro-batches in flight" if stage.in_flight > 1 else ""
    place = "; ".join(part for part in (", ".join(part for part in (where, when) if part), batches) if part)
    return f"{format_bytes(stage.peak)} in use, {format_bytes(stage.reserved)} reserved" + (
        f": {place}" if place else ""
    )


def shares_by_kind(shares: Iterable[Share]) -> dict[str, int]:
    """The peak's bytes by what they are, in a fixed order; kinds that are not there are left out."""
    sums: dict[str, int] = {}
    for share in shares:
        sums[share.what] = sums.get(share.what, 0) + share.bytes
    order = [*(name for name in SHARES if name in sums), *(name for name in sums if name not in SHARES)]
    return {name: sums[name] for name in order}


def shares_by_operator(shares: Iterable[Share]) -> list[tuple[str, str, tuple[int, ...], int]]:
    """What, operator, the layers, and bytes of all of them together; the largest first."""
    sums: dict[tuple[str, str], tuple[set[int], int]] = {}
    for share in shares:
        layers, size = sums.get((share.what, share.operator), (set(), 0))
        more = {share.layer} if share.layer is not None else set()
        sums[share.what, share.operator] = (layers | more, size + share.bytes)
    rows = [(what, operator, tuple(sorted(layers)), size) for (what, operator), (layers, size) in sums.items()]
    return sorted(rows, key=lambda row: (-row[3], row[0], row[1]))


def held_by_decision(plan: Plan) -> Held:
    """What a micro-batch's activations hold in all layers, by decision; zeros where the plan does not say."""
    sums = dict.fromkeys(KINDS, 0)
    for layer in plan.operators:
        for one in layer:
            sums[decision_kind(one.decision)] += one.bytes
    return Held(**sums)


def decided(plan: Plan) -> list[Decided]:
    """What is recomputed and swapped, the largest first; nothing where the plan does not say."""
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for settings, operators in zip(plan.policy.layers, plan.operators, strict=False):
        whole = settings.recomputed_as_a_whole
        sizes: dict[tuple[str, str], int] = {}
        for one in operators:
            kind = decision_kind(one.decision)
            if kind != "keep":
                key = (kind, "" if whole and kind == "recompute" else one.name)
                sizes[key] = sizes.get(key, 0) + one.bytes
        for key, size in sizes.items():
            layers, total = sums.get(key, (0, 0))
            sums[key] = (layers + 1, total + size)
    rows = [Decided(kind, name, layers, size) for (kind, name), (layers, size) in sums.items()]
    return sorted(rows, key=lambda row: (-row.bytes, row.kind, row.name))


def decision_kind(decision: Keep | Recompute | Swap) -> str:
    """``keep``, ``recompute`` or ``swap``."""
    return "swap" if isinstance(decision, Swap) else str(decision)


def recommended(plan: Plan) -> Option | None:
    """The fastest option that fits; the plan's own among equals. None where the plan itself is faster than all."""
    fitting = [option for option in plan.options if option.fits]
    best = min(fitting, key=lambda one: (one.simulation.seconds, one.policy.digest != plan.policy.digest), default=None)
    faster = best is not None and plan.feasible and plan.simulation.seconds < best.simulation.seconds * (1 - 1e-6)
    return None if faster else best


WELL_KNOWN = ("keep everything", "recompute every layer", "what the file says")
"""Options that people compare with, whether they fit or not."""
MUCH = 1.01
"""What is not larger by this factor is as good."""


def shown_options(plan: Plan) -> list[Option]:
    """The options worth showing, the fastest first: the recommended and the well-known ones, and of the others those
    that fit and that no other one equals or beats in both memory and time. Where nothing fits, the two that need
    least."""
    best = recommended(plan)
    fitting = sorted(
        (one for one in plan.options if one.fits), key=lambda one: (one is not best, one.simulation.seconds)
    )
    others: list[Option] = []
    for one in fitting:  # from the fastest on, so each has to need less memory than those before it
        if all(one.simulation.reserved * MUCH < other.simulation.reserved for other in others):
            others.append(one)
    if not fitting:
        others = sorted(plan.options, key=lambda one: one.simulation.reserved)[:2]
    chosen = [one for one in plan.options if one.name in WELL_KNOWN or any(one is other for other in others)]
    return sorted(chosen, key=lambda one: (one.simulation.seconds, one is not best))

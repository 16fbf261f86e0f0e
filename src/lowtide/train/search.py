"""Search for the fastest layout of a model on some devices, with the best Policy of each.

[Note: what is looked at]
A layout's least time is first known from its FLOPs and collectives, then from its step with everything kept and what
must be freed of that (:mod:`lowtide.planner.bound`), then from its plan. What is looked at next is the one that is
expected to be the fastest: FLOPs and collectives make up about the same share of each step, and those that were traced
say which. The search ends when there are enough for a table and the least time of each layout that is not planned is
more than the fastest plan's. The others of the table are the best that were met on the way; the plan of the fastest
alone is compared with simple options, polished, and made with all that a report shows.

What was found out of a layout is not found out again: its Trace, which others that differ in virtual stages share, and
its step with everything kept go from process to process.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import NamedTuple, TypeAlias

from lowtide.cost.device import Device
from lowtide.errors import LowtideError, PlanError
from lowtide.models.shape import DecoderShape
from lowtide.planner.plan import Plan
from lowtide.planner.simulation import Simulation
from lowtide.trace.trace import Trace
from lowtide.train.candidates import Candidate, Size, candidates, least_memory, least_time
from lowtide.train.run import Degrees, Precision
from lowtide.units import format_bytes

__all__ = ["Asked", "Evaluated", "Found", "LeftOut", "Searched", "evaluate", "search", "size_of", "traced_rank"]

SHOWN = 10
"""Layouts in the table."""
NEAR = 1.2
"""While there are fewer, others are planned that may be this much slower than the fastest."""


AHEAD = 6
"""How far down the list to look for a layout whose Trace no other process is making."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is searched for."""

    name: str
    shape: DecoderShape
    device: Device
    devices: int
    global_batch: int
    sequence: int
    precision: Precision
    budget: int | None = None
    """Bytes of each device; what is left of its memory in a layout unless given."""
    reserve: int | None = None
    """Bytes of each device that are not for tensors; what the device's table assumes in a layout unless given."""
    swap: bool = True
    recompute: bool = True
    expert_skew: float = 1.0
    """How many times an even share of the tokens the experts of the fullest rank get."""

    @property
    def most(self) -> int:
        """The bytes that no layout has more of."""
        if self.budget is not None:
            return self.budget
        return self.device.budget if self.reserve is None else max(0, self.device.capacity - self.reserve)


class Found(NamedTuple):
    """A layout that fits, and its plan."""

    candidate: Candidate
    plan: Plan

    @property
    def seconds(self) -> float:
        """Of its step."""
        return self.plan.simulation.seconds


class LeftOut(NamedTuple):
    """A layout that is not among the best."""

    candidate: Candidate
    why: str
    """In a few words, the same for all that fall away for the same reason."""
    detail: str = ""


Outcome: TypeAlias = "Plan | LeftOut | Simulation"


class Evaluated(NamedTuple):
    """What was found out of a layout."""

    outcome: Outcome
    """Its plan, or why it has none; or its step with everything kept, which does not fit."""
    trace: Trace | None
    """None if it was known before, or could not be made."""
    least: float = 0.0
    """No Policy that fits has a faster step."""


class _Waiting(NamedTuple):
    """A layout that is to be looked at."""

    candidate: Candidate
    least: float
    """No Policy has a faster step."""
    kept: Simulation | None = None
    """Its step with everything kept, where that is what is known."""


@dataclass(frozen=True, kw_only=True)
class Searched:
    """What a search found."""

    asked: Asked
    found: tuple[Found, ...]
    """The layouts that fit, the fastest first."""
    left_out: tuple[LeftOut, ...]
    traced: int
    """How many were traced and simulated."""
    seconds: float

    @property
    def proved(self) -> bool:
        """Whether every other layout was planned, or cannot be faster, as the simulator counts."""
        return not any(one.why == "the time was up" for one in self.left_out)

    @property
    def reasons(self) -> dict[str, int]:
        """Why layouts fell away, and how many each time."""
        return dict(Counter(one.why for one in self.left_out).most_common())


def size_of(shape: DecoderShape) -> Size:
    """How many parameters a model has."""
    import torch

    from lowtide.models.build import build_model

    with torch.device("meta"):
        model = build_model(shape)
    layers = experts = 0
    for name, parameter in model.layers.named_parameters():
        if ".experts." in name and "shared" not in name:
            experts += parameter.numel()
        else:
            layers += parameter.numel()
    total = sum(parameter.numel() for parameter in model.parameters())
    share = shape.experts.chosen / shape.experts.count if shape.experts is not None else 0.0
    return Size(layers=layers, experts=experts, around=total - layers - experts, active=round(layers + experts * share))


def search(
    asked: Asked,
    *,
    seconds: float = 540.0,
    workers: int | None = None,
    always: Sequence[Candidate] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> Searched:
    """Look for the fastest layout for at most about ``seconds``.

    ``always`` are layouts that are planned first, whatever is known of them, also those that would not be considered.
    """
    begin = time.monotonic()
    size, left_out = size_of(asked.shape), list[LeftOut]()
    waiting: list[_Waiting] = []
    for one in always:
        _check_always(asked, one)
    considered = candidates(
        asked.shape, asked.devices, asked.global_batch, asked.sequence, asked.device.devices_per_node
    )
    for one in dict.fromkeys((*always, *considered)):
        needed = least_memory(one, size)
        if needed > asked.most and one not in always:
            left_out.append(LeftOut(one, "their parameters, gradients and states do not fit", format_bytes(needed)))
            continue
        least = least_time(one, size, asked.shape, asked.device, asked.precision.compute, asked.sequence)
        waiting.append(_Waiting(one, least))
    if not waiting:
        raise PlanError(_nothing(asked, left_out))
    found, traced, ratios = list[Found](), set[Candidate](), [1.4]
    traces: dict[tuple[Degrees, int], Trace] = {}
    count = workers or os.cpu_count() or 1
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        running: dict[Future[Evaluated], _Waiting] = {}
        while waiting or running:
            fastest = min((one.seconds for one in found), default=inf)
            limit = fastest * (1.0 if len(found) >= SHOWN else NEAR)
            late = time.monotonic() - begin > seconds
            for item in [one for one in waiting if one.candidate not in always and (late or one.least > limit)]:
                waiting.remove(item)
                slower = (
                    "slower at best with what must be freed"
                    if item.kept
                    else "slower by their FLOPs and collectives alone"
                )
                why = slower if item.least > fastest else "the time was up"
                left_out.append(LeftOut(item.candidate, why, f"at least {item.least:.3g} s"))
            usual = median(ratios)
            waiting.sort(key=lambda item: (item.candidate not in always, item.least * (1.0 if item.kept else usual)))
            while waiting and len(running) < count:
                item = _next(waiting, traces, [one.candidate for one in running.values()])
                waiting.remove(item)
                candidate = item.candidate
                plan = item.kept is not None or candidate in always
                trace = traces.get(candidate.traced_as)
                future = pool.submit(evaluate, asked, candidate, plan=plan, trace=trace, kept=item.kept)
                running[future] = item
                traced.add(candidate)
            progress(f"layouts: {len(traced)} traced, {len(found)} fit, {len(left_out)} left out, {len(waiting)} to go")
            done, _ = wait(running, return_when=FIRST_COMPLETED) if running else (set[Future[Evaluated]](), None)
            for future in done:
                item, (outcome, trace, least) = running.pop(future), future.result()
                if trace is not None:
                    traces[item.candidate.traced_as] = trace
                if isinstance(outcome, LeftOut):
                    left_out.append(outcome)
                elif isinstance(outcome, Simulation):
                    ratios.append(least / item.least)
                    waiting.append(_Waiting(item.candidate, least, kept=outcome))
                else:
                    found.append(Found(item.candidate, outcome))
            left = {one.candidate.traced_as for one in (*waiting, *running.values())}
            traces = {key: trace for key, trace in traces.items() if key in left}
    found.sort(key=lambda one: one.seconds)
    if found:
        progress("planning the fastest in full")
        polish = time.monotonic() - begin < seconds / 2
        best = evaluate(asked, found[0].candidate, brief=False, polish=polish).outcome
        if isinstance(best, Plan) and best.simulation.seconds <= found[0].seconds:
            found[0] = Found(found[0].candidate, best)
    return Searched(
        asked=asked,
        found=tuple(found),
        left_out=tuple(left_out),
        traced=len(traced),
        seconds=time.monotonic() - begin,
    )


def _next(
    waiting: Sequence[_Waiting], traces: Mapping[tuple[Degrees, int], Trace], running: Sequence[Candidate]
) -> _Waiting:
    """The layout that is expected to be the fastest, but none whose Trace is being made for another one, unless all
    are."""
    made = {one.traced_as for one in running} - set(traces)
    return next((one for one in waiting[:AHEAD] if one.candidate.traced_as not in made), waiting[0])


def _check_always(asked: Asked, candidate: Candidate) -> None:
    devices, samples = candidate.degrees.world, candidate.degrees.data * candidate.samples * candidate.micro_batches
    if (devices, samples) != (asked.devices, asked.global_batch):
        raise PlanError(
            f"{candidate} is a layout of {devices} devices for steps of {samples} samples; the search is for"
            f" {asked.devices} and {asked.global_batch}"
        )


def _nothing(asked: Asked, left_out: Sequence[LeftOut]) -> str:
    if left_out:
        return (
            f"{asked.name} does not fit on {asked.devices} devices in any layout: parameters, gradients and AdamW's"
            f" states alone take more than {format_bytes(asked.most)} of a device; use more devices"
        )
    return (
        f"no layout of {asked.devices} devices goes with steps of {asked.global_batch} samples: data-parallel ranks"
        " must divide them; change --global-batch or --devices"
    )


def evaluate(
    asked: Asked,
    candidate: Candidate,
    *,
    plan: bool = True,
    brief: bool = True,
    polish: bool = False,
    trace: Trace | None = None,
    kept: Simulation | None = None,
) -> Evaluated:
    """The plan of a layout, or why it has none; without ``plan``, its step with everything kept, unless that fits and
    so is the plan. It is ``brief`` and not polished unless that is asked for; see
    :func:`~lowtide.planner.make.make_plan`. ``trace`` and ``kept`` are what is known of the layout."""
    from lowtide.planner.budget import budget_of
    from lowtide.planner.make import least_step, make_plan
    from lowtide.planner.simulate import simulate
    from lowtide.policy import LayerPolicy, Policy

    made: Trace | None = None
    try:
        if trace is None:
            trace = made = traced_rank(asked, candidate)
        pipeline = candidate.pipeline(len(trace.layers))
        if kept is None:
            kept = simulate(trace, Policy((LayerPolicy(),) * len(trace.layers)), asked.device, pipeline)
        budget = budget_of(asked.device, trace, pipeline, budget=asked.budget, reserve=asked.reserve)
        if not plan and kept.reserved > budget.bytes:
            least = least_step(
                trace, budget.bytes, asked.device, pipeline, kept, swap=asked.swap, recompute=asked.recompute
            )
            if least == inf:
                return Evaluated(LeftOut(candidate, "no Policy fits", f"in {format_bytes(budget.bytes)}"), made)
            return Evaluated(kept, made, least)
        found = make_plan(
            trace,
            budget,
            asked.device,
            pipeline,
            swap=asked.swap,
            recompute=asked.recompute,
            polish=polish,
            brief=brief,
            kept=kept,
        )
    except LowtideError as error:
        return Evaluated(LeftOut(candidate, "they cannot be planned", str(error)), made)
    if not found.feasible:
        return Evaluated(LeftOut(candidate, "no Policy fits", format_bytes(found.least)), made)
    return Evaluated(found, made)


def traced_rank(asked: Asked, candidate: Candidate) -> Trace:
    """The Trace of a rank in a layout, as the runner would train it."""
    from lowtide.cost.imagined import device_kernels
    from lowtide.cost.kernels import family_of
    from lowtide.train.traced import TracedRank, trace_rank

    rank = TracedRank(
        shape=asked.shape,
        degrees=candidate.degrees,
        precision=asked.precision,
        samples=candidate.samples,
        sequence=asked.sequence,
        reshard=candidate.degrees.pipeline == 1,
        expert_skew=asked.expert_skew if candidate.degrees.expert > 1 else 1.0,
    )
    with device_kernels(family_of(asked.device.name)):
        return trace_rank(rank, name=asked.name)

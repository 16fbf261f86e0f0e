"""Simulate a step: the memory and the time of a Policy, from a Trace and a Device, without either.

Each pipeline stage is replayed alone, event by event, which gives its memory and the seconds of each of its actions.
The step's time follows from the actions of all stages and what they wait for.

What is assumed: parameters have no gradient when the step begins, as after ``zero_grad``; a stage's buffers for what it
receives are allocated once for all micro-batches, as torch's pipelining does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from typing import NamedTuple, TypeAlias

from lowtide.cost.device import Device
from lowtide.errors import PlanError
from lowtide.planner.allocator import Limit
from lowtide.planner.boundaries import boundary_bytes
from lowtide.planner.node import in_node
from lowtide.planner.pipeline import Pipeline
from lowtide.planner.schedule import Action, Replay, Transfer, actions, replay, shortened
from lowtide.planner.simulation import Simulation, StageSimulation
from lowtide.planner.stage import Decided, Stage
from lowtide.policy import (
    Catalogue,
    Communication,
    Decision,
    Policy,
    Recompute,
    Resolution,
    ResolvedLayer,
    resolve,
)
from lowtide.policy.collectives import joined, with_collectives
from lowtide.policy.policy import YAML_KEYS
from lowtide.trace.layout import Layout
from lowtide.trace.trace import Part, Trace

__all__ = ["Known", "Played", "simulate"]

Known: TypeAlias = "dict[object, Played]"
"""Stages that were replayed, by what they depend on."""


def simulate(
    trace: Trace,
    policy: Policy | Resolution,
    device: Device,
    pipeline: Pipeline | None = None,
    *,
    details: bool = False,
    optimizer: bool = True,
    stages: Sequence[int] | None = None,
    known: Known | None = None,
    limit: Limit | None = None,
) -> Simulation:
    """What a step of ``policy`` does on ``device``: memory and time.

    ``details`` also says how memory goes over time, what each lane does and what the peak is made of. ``optimizer``
    includes the optimizer's step. ``stages`` are the pipeline stages to look at; all, if it is left out. The step's
    time then is that of these stages alone. ``known`` keeps what was replayed, for other calls with the same Trace,
    device and pipeline: a stage whose layers are decided alike is not replayed again. ``limit`` is what a device has:
    :class:`~lowtide.planner.allocator.LimitError` is raised as soon as more would be reserved, after cached memory has
    been given back if the limit says so.
    """
    pipeline = pipeline or Pipeline()
    if not pipeline.placement:
        pipeline = replace(pipeline, placement=((tuple(range(len(trace.layers))),),))
    device = in_node(device, trace, pipeline)
    policy = policy.for_layers(len(trace.layers)) if isinstance(policy, Policy) else policy
    layers = _layers(trace, policy, pipeline)
    wanted = tuple(range(pipeline.stages)) if stages is None else tuple(stages)
    make = partial(Stage, trace, layers, device, pipeline, limit=limit)
    short = shortened(pipeline)
    transfer = _transfers(trace, device)
    together: dict[int, Stage] = {}
    if stages is None and short is pipeline:
        together = {stage: make(stage, details=details) for stage in wanted}
        step = _together(together, pipeline, transfer)
        played = {number: _finished(stage, optimizer=optimizer) for number, stage in together.items()}
    else:
        played = {}
        for number in wanted:
            key, found = None, None
            if known is not None and isinstance(policy, Policy):
                key = (number, optimizer, limit, _of_stage(policy, pipeline, number))
                found = known.get(key)
            if found is None:
                stage = make(number)
                _act(stage, short)
                found = _finished(stage, optimizer=optimizer)
                if known is not None and key is not None:
                    known[key] = found
            played[number] = found
        seconds = {number: _Seconds(one) for number, one in played.items()}
        if stages is not None:
            step = _alone(seconds, pipeline)
        else:
            step = replay(pipeline, lambda stage, action: seconds[stage].of(action), transfer)
    results = []
    for number, one in played.items():
        result = one.result
        if details:  # replay it again, now that it is known which allocation is at the peak
            again = make(number, details=True, stop_at=one.peak_allocation)
            _act(again, short)
            seen = again.finish(optimizer=optimizer)
            result = replace(result if together else seen, shares=again.shares())
        result = _whole_step(result, one.optimizer_seconds, pipeline.micro_batches / short.micro_batches)
        results.append(replace(result, seconds=step.ends[number] + one.optimizer_seconds))
    slowest = max(result.seconds for result in results)
    return Simulation(seconds=slowest, stages=tuple(results), bubble=step.bubble, notes=_notes(policy))


def _act(stage: Stage, pipeline: Pipeline) -> None:
    for action in actions(pipeline)[stage.number]:
        stage.act(action)


class Played(NamedTuple):
    """A stage that was replayed."""

    seconds: Mapping[Action, float]
    """What each action took."""
    optimizer_seconds: float
    peak_allocation: int
    """Which allocation was at the peak."""
    result: StageSimulation


def _finished(stage: Stage, *, optimizer: bool) -> Played:
    result = stage.finish(optimizer=optimizer)
    return Played(stage.seconds, stage.optimizer_seconds, stage.rank.peak_allocation, result)


def _of_stage(policy: Policy, pipeline: Pipeline, stage: int) -> Policy:
    """All of a Policy that a stage's replay depends on."""
    own = tuple(policy.layers[layer] for chunk in pipeline.placement[stage] for layer in chunk)
    return replace(policy, layers=own)


def _alone(seconds: Mapping[int, _Seconds], pipeline: Pipeline) -> Replay:
    """The times of some stages, as if they waited for no other."""
    ends = [
        sum(map(seconds[stage].of, one)) if stage in seconds else 0.0 for stage, one in enumerate(actions(pipeline))
    ]
    return Replay(max(ends), tuple(ends), 0.0)


def _together(stages: Mapping[int, Stage], pipeline: Pipeline, transfer: Transfer) -> Replay:
    """Replay all stages side by side, each action when what it waits for is there.

    So a copy goes on while its stage waits for another.
    """

    def seconds(number: int, action: Action) -> float:
        stage = stages[number]
        before = stage.now
        stage.act(action)
        return stage.now - before

    return replay(pipeline, seconds, transfer, begin=lambda number, start: stages[number].wait(start))


class _Seconds:
    """The seconds of a stage's actions, those that were left out included: they are as the ones before them."""

    def __init__(self, stage: Played) -> None:
        self.stage = stage
        self.usual = {(action.kind, action.chunk): seconds for action, seconds in stage.seconds.items()}

    def of(self, action: Action) -> float:
        """The seconds of an action."""
        found = self.stage.seconds.get(action)
        return self.usual[action.kind, action.chunk] if found is None else found


def _layers(trace: Trace, policy: Policy | Resolution, pipeline: Pipeline) -> list[Decided]:
    """What is decided for each layer. A Policy is applied to each chunk alone, as a model of its own."""
    if len(policy.layers) != len(trace.layers):
        raise PlanError(f"the policy decides {len(policy.layers)} layers and the trace has {len(trace.layers)}")
    found: dict[int, Decided] = {}
    for own in (chunk for stage in pipeline.placement for chunk in stage):
        if isinstance(policy, Policy):
            part = replace(policy, layers=tuple(policy.layers[layer] for layer in own))
            catalogue = Catalogue(tuple(trace.parts[trace.layers[layer]].catalogue for layer in own))
            resolved = resolve(part, catalogue, require_match=False).layers
            whole = [one.recomputed_as_a_whole for one in part.layers]
        else:
            resolved = tuple(policy.layers[layer] for layer in own)
            whole = [
                bool(one.decisions) and all(isinstance(each, Recompute) for each in one.decisions.values())
                for one in resolved
            ]
        for layer, one, all_of_it in zip(own, resolved, whole, strict=True):
            found[layer] = (_decisions(trace.parts[trace.layers[layer]], one), one.boundary, all_of_it)
    if len(found) != len(trace.layers):
        raise PlanError(f"the pipeline places {len(found)} layers and the trace has {len(trace.layers)}")
    return [found[layer] for layer in range(len(found))]


def _decisions(part: Part, resolved: ResolvedLayer) -> Mapping[str, Decision]:
    """A layer's decisions, with those for its collectives."""
    if not resolved.reissued_collectives and not resolved.kept_collectives:
        return resolved.decisions
    communicating = {kernel.operator for kernel in part.kernels if kernel.ranks}
    changed, _ = with_collectives(
        resolved,
        joined((call.operator, call.reads) for call in part.calls if call.operator in communicating),
        joined((call.operator, call.reads) for call in part.calls if _is_cat(call.operator)),
    )
    return changed


def _is_cat(operator: str) -> bool:
    """Whether an operator, such as ``mlp.cat_1``, puts the results of others in order."""
    return operator.rpartition(".")[2].partition("_")[0] == "cat"


def _notes(policy: Policy | Resolution) -> tuple[str, ...]:
    notes = []
    if isinstance(policy, Policy):
        defaults = asdict(Communication())
        for name, value in asdict(policy.communication).items():
            if value != defaults[name]:
                notes.append(
                    f"{name} ({YAML_KEYS[name]}) is not simulated: memory and time are those of {defaults[name]}"
                )
    return tuple(notes)


def _whole_step(result: StageSimulation, optimizer: float, more: float) -> StageSimulation:
    """A stage's sums for all micro-batches of the step, where it was replayed with fewer."""
    if more == 1:
        return result
    return replace(
        result,
        busy=(result.busy - optimizer) * more + optimizer,
        stall=result.stall * more,
        recompute=result.recompute * more,
        moved=round(result.moved * more),
    )


def _transfers(trace: Trace, device: Device) -> Transfer:
    """How long a boundary takes from a stage to another, whose devices may be on other nodes."""
    size = max((boundary_bytes(trace.parts[place], "input") for place in trace.layers), default=0)
    layout, share = trace.layout or Layout(), device.efficiency.get("collective", 1.0)

    @cache
    def transfer(source: int, stage: int) -> float:
        outside = layout.crosses_nodes(source, stage, device.devices_per_node)
        return device.collective_latency + size / (share * (device.network if outside else device.interconnect))

    return transfer

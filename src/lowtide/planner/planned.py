"""A Policy spelled out: what becomes of each operator of each layer, and how much that is about."""

from __future__ import annotations

from lowtide.planner.plan import PlannedOperator
from lowtide.policy import Policy, ResolvedLayer, resolve
from lowtide.trace.trace import Part, Trace

__all__ = ["planned_operators"]


def planned_operators(trace: Trace, policy: Policy) -> tuple[tuple[PlannedOperator, ...], ...]:
    """For each layer, its input and the operators that hold something for backward, each with its decision.

    Layers of one kind that a Policy treats alike share one tuple.
    """
    resolution = resolve(policy, trace.catalogue, require_match=False)
    # A layer's decisions are compared by content: resolving may give equal layers objects of their own.
    done: dict[tuple[object, ...], tuple[PlannedOperator, ...]] = {}

    def planned(place: int, layer: ResolvedLayer) -> tuple[PlannedOperator, ...]:
        key = (place, layer.boundary, tuple(layer.decisions.values()))
        if key not in done:
            done[key] = _planned(trace.parts[place], layer)
        return done[key]

    return tuple(planned(place, layer) for place, layer in zip(trace.layers, resolution.layers, strict=True))


def _planned(part: Part, layer: ResolvedLayer) -> tuple[PlannedOperator, ...]:
    rows = [PlannedOperator(one.name, one.owned, layer.decisions[one.name]) for one in part.operators if one.owned > 0]
    boundary = part.values[part.input].size if part.input is not None else 0
    return (PlannedOperator("input", boundary, layer.boundary), *rows) if boundary else tuple(rows)

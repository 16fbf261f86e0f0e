"""The pictures of a page that do not run over time: options, decisions, pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from lowtide.planner.plan import Plan
from lowtide.planner.simulation import StageSimulation
from lowtide.report.axes import Figure, budget_marks, byte_scale, short, time_scale
from lowtide.report.words import KINDS, decision_kind, recommended, shown_options
from lowtide.units import format_bytes, format_seconds

__all__ = ["curve_figure", "grid_figure", "stage_memory_figure", "stage_time_figure"]


def curve_figure(plan: Plan) -> Figure:
    """The fastest step for each budget, and the options as points."""
    best = recommended(plan)
    points = [(one, one.simulation.reserved, one.simulation.seconds) for one in shown_options(plan)]
    highest = max([plan.simulation.reserved, *(size for _, size, _ in points), *(size for size, _ in plan.curve)])
    memory = byte_scale(highest)
    time = time_scale(max([*(at for _, _, at in points), *(at for _, at in plan.curve)], default=0.0))
    curve = sorted(plan.curve)
    traces: list[Figure] = []
    if curve:
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "the fastest that fits",
                "x": [short(size / memory.size) for size, _ in curve],
                "y": [short(at / time.size) for _, at in curve],
                "line": {"color": "@keep", "width": 2},
                "hovertemplate": f"%{{x:.2f}} {memory.unit}: %{{y:.2f}} {time.unit} a step<extra></extra>",
            }
        )
    sizes = [size for _, size, _ in points] or [plan.budget]
    middle = (min(sizes) + max(sizes)) / 2
    traces.append(
        {
            "type": "scatter",
            "mode": "markers+text",
            "name": "options",
            "x": [short(size / memory.size) for _, size, _ in points],
            "y": [short(at / time.size) for _, _, at in points],
            "text": [escape(one.name) for one, _, _ in points],
            # Neighbours are written above and below, so that they do not overlap.
            "textposition": [
                f"{('top', 'bottom')[place % 2]} {'right' if size <= middle else 'left'}"
                for place, (_, size, _) in enumerate(points)
            ],
            "hovertemplate": f"%{{text}}<br>%{{x:.2f}} {memory.unit}, %{{y:.2f}} {time.unit} a step<extra></extra>",
            "marker": {
                "size": [13 if one is best else 9 for one, _, _ in points],
                "color": ["@swap" if one is best else "@keep" if one.fits else "@paper" for one, _, _ in points],
                "line": {
                    "width": 1.5,
                    "color": ["@swap" if one is best else "@keep" if one.fits else "@alarm" for one, _, _ in points],
                },
            },
        }
    )
    marks = budget_marks(plan.budget if plan.bounded else None, highest, memory, upright=True)
    return {
        "data": traces,
        "layout": {
            "height": 380,
            "xaxis": {"title": {"text": "reserved memory"}, "ticksuffix": f" {memory.unit}", "nticks": 7},
            "yaxis": {"title": {"text": "time of a step"}, "ticksuffix": f" {time.unit}", "nticks": 6},
            "shapes": marks.shapes,
            "annotations": marks.labels,
        },
        "narrow": {"height": 340, "xaxis.nticks": 4, "yaxis.title.text": ""},
        # Names would run into each other; the table below has them, and touching a point says its own.
        "narrow_data": {"options": {"mode": "markers"}},
    }


def grid_figure(plan: Plan) -> Figure:
    """Layers across, operators down, coloured by decision."""
    layers = len(plan.operators)
    names = list(dict.fromkeys(one.name for layer in plan.operators for one in layer))
    places = {name: row for row, name in enumerate(names)}
    colours: list[list[int | None]] = [[None] * layers for _ in names]
    texts: list[list[str]] = [[""] * layers for _ in names]
    for column, layer in enumerate(plan.operators):
        for one in layer:
            colours[places[one.name]][column] = KINDS.index(decision_kind(one.decision))
            texts[places[one.name]][column] = f"{one.decision}, {format_bytes(one.bytes)}"
    steps = [(place / 3, f"@{kind}") for place, kind in enumerate(KINDS)]
    scale = [[edge, colour] for start, colour in steps for edge in (start, start + 1 / 3)]
    labels = [escape(name) for name in names]
    heatmap = {
        "type": "heatmap",
        "z": colours,
        "y": labels,
        "text": texts,
        "hovertemplate": "layer %{x} · %{y}<br>%{text}<extra></extra>",
        "hoverongaps": False,
        "zmin": -0.5,
        "zmax": 2.5,
        "colorscale": scale,
        "showscale": False,
        "xgap": 1 if layers <= 64 else 0,
        "ygap": 1,
    }
    edges = _stage_edges(plan)
    return {
        "data": [heatmap],
        "layout": {
            "height": 90 + 19 * len(names),
            "xaxis": {
                "title": {"text": "layer"},
                "dtick": -(-layers // 16),
                "range": [-0.5, layers - 0.5],
                "showgrid": False,
            },
            "yaxis": {
                "autorange": "reversed",
                "showgrid": False,
                "tickmode": "array",
                "tickvals": labels,
                "ticktext": labels,
                "fixedrange": True,
            },
            "shapes": [
                {
                    "type": "line",
                    "xref": "x",
                    "yref": "paper",
                    "x0": edge - 0.5,
                    "x1": edge - 0.5,
                    "y0": 0,
                    "y1": 1,
                    "line": {"color": "@ink", "width": 1},
                }
                for edge in edges
            ],
        },
        "narrow": {"yaxis.ticktext": [_last_name(name) for name in names], "xaxis.dtick": -(-layers // 6)},
    }


def _stage_edges(plan: Plan) -> list[int]:
    """The layers at which another stage, or another chunk, begins."""
    if plan.pipeline.stages < 2:
        return []
    return sorted(chunk[0] for stage in plan.pipeline.placement for chunk in stage if chunk and chunk[0] > 0)


class Part(NamedTuple):
    """One colour of a stack of bars."""

    name: str
    colour: str
    values: list[float]
    """In the axis's unit, one a stage."""
    texts: list[str]


def stage_memory_figure(plan: Plan) -> Figure:
    """What each stage's device holds at its peak."""
    stages = plan.simulation.stages
    memory = byte_scale(plan.simulation.reserved)

    def part(name: str, colour: str, sizes: list[int]) -> Part:
        return Part(name, colour, [size / memory.size for size in sizes], [format_bytes(size) for size in sizes])

    parts = [
        part("weights, gradients, optimizer", "@deep", [stage.static for stage in stages]),
        part("activations and buffers", "@keep", [stage.peak - stage.static for stage in stages]),
        part("reserved, not in use", "@line", [stage.reserved - stage.peak for stage in stages]),
    ]
    figure = _stage_bars(stages, parts, memory.unit)
    marks = budget_marks(
        plan.budget if plan.bounded else None, plan.simulation.reserved, memory, upright=len(stages) <= _LYING
    )
    figure["layout"] |= {"shapes": marks.shapes, "annotations": marks.labels}
    return figure


def stage_time_figure(plan: Plan) -> Figure:
    """What each stage's device does in a step."""
    stages = plan.simulation.stages
    step = plan.simulation.seconds
    time = time_scale(step)

    def part(name: str, colour: str, each: list[float]) -> Part:
        return Part(name, colour, [one / time.size for one in each], [format_seconds(one) for one in each])

    parts = [
        part("computing", "@compute", [stage.busy - stage.recompute for stage in stages]),
        part("recomputing", "@recompute", [stage.recompute for stage in stages]),
        part("waiting for copies", "@alarm", [stage.stall for stage in stages]),
        part("waiting for stages", "@line", [max(step - stage.busy - stage.stall, 0.0) for stage in stages]),
    ]
    return _stage_bars(stages, parts, time.unit)


_LYING = 4
"""Bars are horizontal where there are no more stages than these, and vertical where there are."""


def _stage_bars(stages: Sequence[StageSimulation], parts: Sequence[Part], unit: str) -> Figure:
    lying = len(stages) <= _LYING
    names = [f"stage {stage.stage}" if lying else str(stage.stage) for stage in stages] if len(stages) > 1 else [""]
    traces = [
        {
            "type": "bar",
            "orientation": "h" if lying else "v",
            "name": part.name,
            "x" if lying else "y": list(map(short, part.values)),
            "y" if lying else "x": names,
            "marker": {"color": part.colour},
            "text": part.texts,
            "textposition": "none",
            "hovertemplate": f"%{{text}} {part.name}<extra>%{{{'y' if lying else 'x'}}}</extra>",
        }
        for part in parts
        if any(part.values)
    ]
    value = {"ticksuffix": f" {unit}", "nticks": 6, "rangemode": "tozero"}
    category = {"type": "category", "showgrid": False, "fixedrange": True}
    layout: Figure = {
        "barmode": "stack",
        "bargap": 0.35,
        "height": 110 + 44 * len(stages) if lying else 300,
        "showlegend": True,
        "xaxis": value if lying else {**category, "title": {"text": "stage"}},
        "yaxis": {**category, "autorange": "reversed"} if lying else value,
    }
    return {"data": traces, "layout": layout, "narrow": {("xaxis" if lying else "yaxis") + ".nticks": 4}}


def _last_name(name: str) -> str:
    """The end of a dotted path, for a narrow screen."""
    last = name.rpartition(".")[2]
    return escape(last if len(last) > 2 else ".".join(name.split(".")[-2:]))

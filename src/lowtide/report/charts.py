"""The pictures of a page, as plotly's plain JSON: traces and layout, without plotly.

Colours are names such as ``@swap``; the page's script gives them the values of its style sheet, light or dark. A figure
may have ``narrow``: layout that replaces the other on a small screen.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple, TypeAlias

from lowtide.plan.plan import Plan
from lowtide.plan.simulation import StageSimulation
from lowtide.report.run import Run
from lowtide.report.thin import MOST_BLOCKS, ROWS, SLICES, Block, blocks, thin_memory, thin_points
from lowtide.report.words import KINDS, decision_kind, recommended, ways
from lowtide.units import format_bytes, format_seconds

__all__ = [
    "Figure",
    "curve_figure",
    "grid_figure",
    "lanes_figure",
    "memory_figure",
    "stage_memory_figure",
    "stage_time_figure",
]

Figure: TypeAlias = dict[str, Any]

LANE_COLOURS = {
    "forward": "@compute",
    "backward": "@deep",
    "collective": "@muted",
    "optimizer": "@muted",
    "recompute": "@recompute",
    "stall": "@alarm",
    "copy out": "@swap",
    "copy back": "@swap",
    "late": "@alarm",
}


class Scale(NamedTuple):
    """The unit of an axis."""

    unit: str
    size: float


def time_scale(seconds: float) -> Scale:
    """Seconds or milliseconds, whichever gives a person numbers to read."""
    return Scale("s", 1.0) if seconds >= 2 else Scale("ms", 1e-3)


def byte_scale(size: int) -> Scale:
    """The same for memory."""
    return Scale("GiB", 2.0**30) if size >= 2 * 2**30 else Scale("MiB", 2.0**20)


def memory_figure(
    stage: StageSimulation | None, budget: int | None, run: Run | None, seconds: float, slices: int = SLICES
) -> Figure:
    """Memory over a step: planned, measured, and the budget."""
    measured = thin_points(run.memory, slices) if run is not None else []
    highest = max([stage.reserved if stage else 0, budget or 0, *(size for _, size in measured)])
    memory, time = byte_scale(highest), time_scale(seconds)
    at = f"%{{y:.2f}} {memory.unit} at %{{x:.2f}} {time.unit}"
    traces: list[Figure] = []
    shapes, notes = [], []
    if stage is not None and stage.memory:
        moments = thin_memory(stage.memory, slices)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "planned",
                "x": [_short(one.time / time.size) for one in moments],
                "y": [_short(one.allocated / memory.size) for one in moments],
                "text": [_place(one.layer, one.operator) for one in moments],
                "hovertemplate": f"%{{text}}<br>{at}<extra>planned</extra>",
                "line": {"color": "@keep", "width": 1.5, "shape": "hv"},
                "fill": "tozeroy",
                "fillcolor": "@wash",
            }
        )
        if stage.peak_at is not None:
            marker, label = _peak(stage, memory, time)
            traces.append(marker)
            notes.append(label)
    if measured:
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "measured",
                "x": [_short(when / time.size) for when, _ in measured],
                "y": [_short(size / memory.size) for _, size in measured],
                "hovertemplate": f"{at}<extra>measured</extra>",
                "line": {"color": "@ink", "width": 1.25, "shape": "hv"},
            }
        )
    if budget is not None:
        shapes.append(_budget_line(_short(budget / memory.size), upright=False))
        notes.append(_label(budget / memory.size, f"budget {format_bytes(budget)}", "@alarm-text"))
    return {
        "data": traces,
        "layout": {
            "height": 360,
            "margin": _TIMED,
            "xaxis": {"range": [0, _short(seconds / time.size)], "ticksuffix": f" {time.unit}", "nticks": 8},
            "yaxis": {
                "range": [0, _short(highest / memory.size * 1.12)],
                "ticksuffix": f" {memory.unit}",
                "nticks": 6,
                "automargin": False,
            },
            "shapes": shapes,
            "annotations": notes,
            "showlegend": bool(measured) and len(traces) > 1,
        },
        "narrow": {"height": 300, "xaxis.nticks": 4, "margin.l": 68},
    }


_TIMED = {"l": 86, "b": 28}
"""The same left edge for all that is drawn over the step's time."""


def _peak(stage: StageSimulation, memory: Scale, time: Scale) -> tuple[Figure, Figure]:
    """The highest point, and what is written beside it: below the line, where there is room."""
    assert stage.peak_at is not None
    text = f"peak {format_bytes(stage.peak)} · {_place(stage.peak_at.layer, stage.peak_at.operator)}"
    x, y = _short(stage.peak_at.time / time.size), _short(stage.peak / memory.size)
    late = stage.peak_at.time > stage.seconds / 2
    marker = {
        "type": "scatter",
        "mode": "markers",
        "name": "peak",
        "x": [x],
        "y": [y],
        "text": [text],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"color": "@ink", "size": 7},
        "showlegend": False,
    }
    arrow = {"arrowcolor": "@ink", "arrowwidth": 1, "arrowhead": 0, "standoff": 4, "ax": -12 if late else 12, "ay": 150}
    side = {"xanchor": "right" if late else "left", "align": "left", "bgcolor": "@paper", "borderpad": 3}
    return marker, {"x": x, "y": y, "text": text, "showarrow": True, "font": {"color": "@ink"}, **arrow, **side}


def lanes_figure(stage: StageSimulation, seconds: float, most: int = MOST_BLOCKS) -> Figure:
    """What the device and the link do over the step, a row each."""
    time = time_scale(seconds)
    found = blocks(stage.spans, seconds, most)
    least = seconds / 1500  # a hair wide, so that it can be seen and found with the mouse
    rows = [row for row in dict.fromkeys(ROWS.values()) if any(block.row == row for block in found)]
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": kind,
            "base": [_short(one.start / time.size) for one in mine],
            "x": [_short(max(one.end - one.start, least) / time.size) for one in mine],
            "y": [one.row for one in mine],
            "text": [_block(one) for one in mine],
            "textposition": "none",
            "hovertemplate": "%{text}<extra></extra>",
            "marker": {"color": colour, "opacity": [_opacity(one, least) for one in mine], "line": {"width": 0}},
            "width": 0.72,
        }
        for kind, colour in LANE_COLOURS.items()
        if (mine := [block for block in found if block.kind == kind])
    ]
    return {
        "data": traces,
        "layout": {
            "height": 60 + 34 * len(rows),
            "barmode": "overlay",
            "margin": _TIMED,
            "xaxis": {"range": [0, _short(seconds / time.size)], "ticksuffix": f" {time.unit}", "nticks": 8},
            "yaxis": {"categoryorder": "array", "categoryarray": rows[::-1], "fixedrange": True, "automargin": False},
        },
        "narrow": {"xaxis.nticks": 4, "margin.l": 68},
    }


def _block(one: Block) -> str:
    what = {"late": "copy back, waited for", "stall": "waiting for a copy"}.get(one.kind, one.kind)
    layers = f" · layer{'s' if '-' in one.layers or ',' in one.layers else ''} {one.layers[:40]}" if one.layers else ""
    operator = f" · {escape(one.operator)}" if one.operator else ""
    size = f"<br>{format_bytes(one.bytes)}" if one.bytes else ""
    count = f" in {one.spans} pieces" if one.spans > 1 else ""
    return f"<b>{what}</b>{layers}{operator}{size}<br>{format_seconds(one.busy)}{count}"


def _opacity(one: Block, least: float) -> float:
    """The share of a block's length that it was busy for, but never so little that it could not be seen."""
    share = one.busy / max(one.end - one.start, least)
    return round(min(max(share, 0.5 if one.kind == "stall" else 0.15), 1.0), 2)


def curve_figure(plan: Plan) -> Figure:
    """The fastest step for each budget, and the ways to run as points."""
    best = recommended(plan)
    points = [(one, one.simulation.reserved, one.simulation.seconds) for one in ways(plan)]
    memory = byte_scale(max([plan.budget, *(size for _, size, _ in points), *(size for size, _ in plan.curve)]))
    time = time_scale(max([*(at for _, _, at in points), *(at for _, at in plan.curve)], default=0.0))
    curve = sorted(plan.curve)
    traces: list[Figure] = []
    if curve:
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "the fastest that fits",
                "x": [_short(size / memory.size) for size, _ in curve],
                "y": [_short(at / time.size) for _, at in curve],
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
            "name": "ways to run it",
            "x": [_short(size / memory.size) for _, size, _ in points],
            "y": [_short(at / time.size) for _, _, at in points],
            "text": [escape(one.name) for one, _, _ in points],
            # Neighbours are written above and below, so that one does not stand on the other.
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
    at = _short(plan.budget / memory.size)
    return {
        "data": traces,
        "layout": {
            "height": 380,
            "xaxis": {"title": {"text": "reserved memory"}, "ticksuffix": f" {memory.unit}", "nticks": 7},
            "yaxis": {"title": {"text": "time of a step"}, "ticksuffix": f" {time.unit}", "nticks": 6},
            "shapes": [_budget_line(at, upright=True)],
            "annotations": [
                {
                    "x": at,
                    "y": 1,
                    "yref": "paper",
                    "yanchor": "bottom",
                    "text": f"budget {format_bytes(plan.budget)}",
                    "showarrow": False,
                    "font": {"color": "@alarm-text"},
                }
            ],
        },
        "narrow": {"height": 340, "xaxis.nticks": 4, "yaxis.title.text": ""},
    }


def grid_figure(plan: Plan) -> Figure:
    """Layers across, operators down, coloured by decision."""
    names = list(dict.fromkeys(one.name for layer in plan.operators for one in layer))
    places = {name: row for row, name in enumerate(names)}
    colours: list[list[int | None]] = [[None] * len(plan.operators) for _ in names]
    texts: list[list[str]] = [[""] * len(plan.operators) for _ in names]
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
        "xgap": 1 if len(plan.operators) <= 64 else 0,
        "ygap": 1,
    }
    edges = _stage_edges(plan)
    return {
        "data": [heatmap],
        "layout": {
            "height": 90 + 19 * len(names),
            "xaxis": {"title": {"text": "layer"}, "nticks": 16, "showgrid": False, "zeroline": False},
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
        "narrow": {"yaxis.ticktext": [_last_name(name) for name in names], "xaxis.nticks": 6},
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
    at, lying = _short(plan.budget / memory.size), len(stages) <= _LYING
    text, font = f"budget {format_bytes(plan.budget)}", {"color": "@alarm-text"}
    line, label = _budget_line(at, upright=lying), {"text": text, "showarrow": False, "font": font, "yanchor": "bottom"}
    where = {"x": at, "y": 1, "yref": "paper"} if lying else {"x": 1, "xref": "paper", "y": at, "xanchor": "right"}
    figure["layout"] |= {"shapes": [line], "annotations": [{**where, **label}]}
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
"""Bars lie where there are no more stages than these, and stand where there are."""


def _stage_bars(stages: Sequence[StageSimulation], parts: Sequence[Part], unit: str) -> Figure:
    lying = len(stages) <= _LYING
    names = [f"stage {stage.stage}" if lying else str(stage.stage) for stage in stages] if len(stages) > 1 else [""]
    traces = [
        {
            "type": "bar",
            "orientation": "h" if lying else "v",
            "name": part.name,
            "x" if lying else "y": list(map(_short, part.values)),
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


def _budget_line(at: float, *, upright: bool) -> Figure:
    across = {"xref": "paper", "yref": "y", "x0": 0, "x1": 1, "y0": at, "y1": at}
    up = {"xref": "x", "yref": "paper", "x0": at, "x1": at, "y0": 0, "y1": 1}
    return {"type": "line", **(up if upright else across), "line": {"color": "@alarm", "width": 1, "dash": "dash"}}


def _label(y: float, text: str, colour: str) -> Figure:
    where = {"xref": "paper", "x": 1, "xanchor": "right", "y": _short(y), "yanchor": "bottom", "showarrow": False}
    return {**where, "text": text, "font": {"color": colour}}


def _place(layer: int | None, operator: str) -> str:
    where = f"layer {layer}" if layer is not None else "outside the layers"
    return f"{where} · {escape(operator)}" if operator else where


def _last_name(name: str) -> str:
    """The end of a dotted path, for a narrow screen."""
    last = name.rpartition(".")[2]
    return escape(last if len(last) > 2 else ".".join(name.split(".")[-2:]))


def _short(number: float) -> float:
    """Five digits are more than a picture shows, and half the page's size."""
    return float(f"{number:.5g}")

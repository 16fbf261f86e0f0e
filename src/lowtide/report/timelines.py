"""The pictures of a page that run over a step's time: memory, and what the device and the link do."""

from __future__ import annotations

from html import escape

from lowtide.planner.simulation import StageSimulation
from lowtide.report.axes import FAR, Figure, Scale, budget_marks, byte_scale, short, time_scale
from lowtide.report.run import Run
from lowtide.report.thin import MOST_BLOCKS, ROWS, SLICES, Block, blocks, thin_memory, thin_points
from lowtide.units import format_bytes, format_seconds

__all__ = ["lanes_figure", "memory_figure"]

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


def memory_figure(
    stage: StageSimulation | None, budget: int | None, run: Run | None, seconds: float, slices: int = SLICES
) -> Figure:
    """Memory over a step: planned, measured, and the budget."""
    measured = thin_points(run.memory, slices) if run is not None else []
    highest = max([stage.reserved if stage else 0, *(size for _, size in measured)])
    top = max(highest, budget) if budget is not None and budget <= FAR * highest else highest
    memory, time = byte_scale(top), time_scale(seconds)
    at = f"%{{y:.2f}} {memory.unit} at %{{x:.2f}} {time.unit}"
    traces: list[Figure] = []
    shapes: list[Figure] = []
    notes: list[Figure] = []
    if stage is not None and stage.memory:
        moments = thin_memory(stage.memory, slices)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "planned",
                "x": [short(one.time / time.size) for one in moments],
                "y": [short(one.allocated / memory.size) for one in moments],
                "text": [_place(one.layer, one.operator) for one in moments],
                "hovertemplate": f"%{{text}}<br>{at}<extra>planned</extra>",
                "line": {"color": "@keep", "width": 1.5, "shape": "hv"},
                "fill": "tozeroy",
                "fillcolor": "@wash",
            }
        )
        if stage.peak_at is not None:
            marker, note = _peak(stage, memory, time, top)
            traces.append(marker)
            notes.append(note)
    if measured:
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "measured",
                "x": [short(when / time.size) for when, _ in measured],
                "y": [short(size / memory.size) for _, size in measured],
                "hovertemplate": f"{at}<extra>measured</extra>",
                "line": {"color": "@ink", "width": 1.25, "shape": "hv"},
            }
        )
    if budget is not None:
        marks = budget_marks(budget, highest, memory, upright=False)
        shapes += marks.shapes
        notes += marks.labels
    return {
        "data": traces,
        "layout": {
            "height": 360,
            "margin": _TIMED,
            "xaxis": {"range": [0, short(seconds / time.size)], "ticksuffix": f" {time.unit}", "nticks": 8},
            "yaxis": {
                "range": [0, short(top / memory.size * 1.12)],
                "ticksuffix": f" {memory.unit}",
                "nticks": 6,
                "automargin": False,
            },
            "shapes": shapes,
            "annotations": notes,
            "showlegend": bool(measured) and len(traces) > 1,
        },
        # Where the peak is does not fit next to it on a small screen; touching the point says it.
        "narrow": {
            "height": 300,
            "xaxis.nticks": 4,
            "margin.l": 68,
            "annotations": [{**note, "text": note["text"].partition(" · ")[0]} for note in notes],
        },
    }


_TIMED = {"l": 86, "b": 28}
"""The same left edge for all that is drawn over the step's time."""


def _peak(stage: StageSimulation, memory: Scale, time: Scale, top: int) -> tuple[Figure, Figure]:
    """The highest point, and its label where there is room: below the line, or above it."""
    assert stage.peak_at is not None
    text = f"peak {format_bytes(stage.peak)} · {_place(stage.peak_at.layer, stage.peak_at.operator)}"
    x, y = short(stage.peak_at.time / time.size), short(stage.peak / memory.size)
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
    arrow = {"arrowcolor": "@ink", "arrowwidth": 1, "arrowhead": 0, "standoff": 4, "ax": -12 if late else 12}
    arrow["ay"] = 150 if stage.peak > top / 2 else -50
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
            "base": [short(one.start / time.size) for one in mine],
            "x": [short(max(one.end - one.start, least) / time.size) for one in mine],
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
            "xaxis": {"range": [0, short(seconds / time.size)], "ticksuffix": f" {time.unit}", "nticks": 8},
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


def _place(layer: int | None, operator: str) -> str:
    where = f"layer {layer}" if layer is not None else "outside the layers"
    return f"{where} · {escape(operator)}" if operator else where

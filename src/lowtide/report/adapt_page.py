"""An adaptive run on the page: its steps over time, and what happened when."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby

from lowtide.adaptive.record import AdaptRecord, AdaptStep
from lowtide.report.axes import Figure, Scale, byte_scale, short, time_scale
from lowtide.units import format_bytes, format_seconds

__all__ = ["adaptive_events", "adaptive_figures", "adaptive_sentence"]

FAR = 2
"""A capacity or budget of so many times the most that was reserved is far above it."""
MOST_STEPS = 2000
"""Points of a picture; of more steps the one that reserved most is shown for each few."""
FEW_STEPS = 10
"""So many steps have a tick each: between two of them there is nothing."""
MOST_EVENTS = 40
"""Events that are listed; further ones are counted."""
MOST_LABELS = 6
"""Switches that are named in a picture; all have a line."""
_WORDS = {
    "measured": "measured",
    "planned": "planned",
    "switched": "switched",
    "rescued": "rescued",
    "retried": "retried",
    "replanned": "new plan",
    "warned": "note",
}
_COLOURS = {"measuring": "@recompute", "planned": "@swap"}
_NAMES = {"measuring": "measuring, under the safe policy", "planned": "under the plan"}


def adaptive_sentence(record: AdaptRecord) -> str:
    """The run in one sentence."""
    steps = record.steps[-1].step if record.steps else 0
    parts = [f"{steps} step{'s' if steps != 1 else ''}"]
    measuring = [step.seconds for step in record.steps if step.phase == "measuring"]
    planned = [step.seconds for step in record.steps if step.phase == "planned"]
    if measuring:
        parts.append(f"{len(measuring)} of them while measuring")
    plans = sum(event.kind == "replanned" for event in record.events)
    if plans:
        parts.append(f"{plans} new plan{'s' if plans > 1 else ''}")
    rescued = sum(step.rescued for step in record.steps)
    retried = sum(event.kind == "retried" for event in record.events)
    failed = f"{rescued} allocation{'s' if rescued > 1 else ''} failed and the run went on" if rescued else ""
    parts.append(failed or "no allocation failed")
    if retried:
        parts.append(f"{retried} step{'s' if retried > 1 else ''} retried")
    faster = ""
    if measuring and planned:
        faster = f" A step took {format_seconds(_middle(measuring))} before the switch and"
        faster += f" {format_seconds(_middle(planned))} after it."
    return ", ".join(parts) + "." + faster + _far_above(record)


def _far_above(record: AdaptRecord) -> str:
    """What the picture does not show: a line far above would flatten it."""
    highest = max((step.peak_reserved for step in record.steps), default=0)
    far = [
        f"the {name} of {format_bytes(size)}"
        for name, size in (("capacity", record.capacity), ("budget", record.budget))
        if highest and size is not None and size > FAR * highest
    ]
    text = " and ".join(far)
    return f" {text[:1].upper()}{text[1:]} {'are' if len(far) > 1 else 'is'} far above." if far else ""


def adaptive_figures(record: AdaptRecord) -> dict[str, Figure]:
    """The time of each step, and what each reserved against the budget and the device's memory."""
    steps = _thinned(record.steps)
    if not steps:
        return {}
    time = time_scale(max(step.seconds for step in steps))
    found = {"adapt_time": _figure(record, steps, [step.seconds for step in steps], time, "time of a step")}
    if any(step.peak_reserved for step in steps):
        known = [size for size in (record.capacity, record.budget) if size is not None]
        highest = max(step.peak_reserved for step in steps)
        near = [size for size in known if size <= FAR * highest]
        memory = byte_scale(max([highest, *near]))
        figure = _figure(record, steps, [float(step.peak_reserved) for step in steps], memory, "most reserved")
        if any(step.peak_allocated for step in steps):
            figure["data"].append(_in_use(steps, memory))
        for name, size in (("capacity", record.capacity), ("budget", record.budget)):
            if size in near:
                _level(figure, name, size, memory)
        found["adapt_memory"] = figure
    return found


def adaptive_events(record: AdaptRecord) -> str:
    """What happened, as a table."""
    rows = "".join(
        f"<tr><td>{event.step}</td><td>{_WORDS[event.kind]}</td><td>{escape(event.text)}</td></tr>"
        for event in record.events[:MOST_EVENTS]
    )
    more = len(record.events) - MOST_EVENTS
    left = f'<p class="lead">{more} more are in adaptive.json.</p>' if more > 0 else ""
    if not rows:
        return '<p class="lead">Nothing happened yet.</p>'
    return f'<table class="events"><tr><th>step</th><th>what</th><th>why</th></tr>{rows}</table>{left}'


def _in_use(steps: Sequence[AdaptStep], memory: Scale) -> Figure:
    """What was in use of what each step reserved."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "in use, of what is reserved",
        "x": [step.step for step in steps],
        "y": [short(step.peak_allocated / memory.size) for step in steps],
        "line": {"color": "@muted", "width": 1.5, "dash": "dot"},
        "hovertemplate": f"step %{{x}}: %{{y}} {memory.unit} in use<extra></extra>",
    }


def _figure(
    record: AdaptRecord, steps: Sequence[AdaptStep], values: Sequence[float], scale: Scale, title: str
) -> Figure:
    """One number of each step: a line for each phase, and the steps in which an allocation failed as marks."""
    points = list(zip(steps, values, strict=True))
    traces: list[Figure] = []
    shown: set[str] = set()
    for phase, group in groupby(points, key=lambda point: point[0].phase):
        some = list(group)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(points) <= 200 else "lines",
                "name": _NAMES[phase],
                "showlegend": phase not in shown,
                "x": [step.step for step, _ in some],
                "y": [short(value / scale.size) for _, value in some],
                "line": {"color": _COLOURS[phase], "width": 1.5},
                "marker": {"size": 4},
                "hovertemplate": f"step %{{x}}: %{{y}} {scale.unit}<extra></extra>",
            }
        )
        shown.add(phase)
    failed = [(step, value) for step, value in points if step.rescued]
    if failed:
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "an allocation failed, the run went on",
                "x": [step.step for step, _ in failed],
                "y": [short(value / scale.size) for _, value in failed],
                "text": [f"{step.rescued} rescued" for step, _ in failed],
                "marker": {"color": "@alarm", "size": 8, "symbol": "x"},
                "hovertemplate": f"step %{{x}}: %{{y}} {scale.unit}, %{{text}}<extra></extra>",
            }
        )
    switches = [event.step + 0.5 for event in record.events if event.kind == "switched"]
    return {
        "data": traces,
        "layout": {
            "height": 300,
            "showlegend": True,
            "xaxis": {"title": {"text": "step"}, **({"dtick": 1} if len(steps) <= FEW_STEPS else {"nticks": 10})},
            "yaxis": {
                "title": {"text": title},
                "ticksuffix": f" {scale.unit}",
                "nticks": 6,
                "rangemode": "tozero",
            },
            "shapes": [_upright(at) for at in switches[:MOST_EVENTS]],
            "annotations": [
                _named(at, "switch" if place == 0 else "new plan") for place, at in enumerate(switches[:MOST_LABELS])
            ],
        },
        "narrow": {"xaxis.nticks": 5, "yaxis.title.text": ""},
    }


def _upright(at: float) -> Figure:
    """A line between two steps, where another Policy was put to work."""
    line = {"color": "@ink", "width": 1, "dash": "dot"}
    return {"type": "line", "xref": "x", "yref": "paper", "x0": at, "x1": at, "y0": 0, "y1": 1, "line": line}


def _named(at: float, name: str) -> Figure:
    text = {"showarrow": False, "font": {"color": "@muted"}, "xanchor": "left", "yanchor": "bottom"}
    return {**text, "xref": "x", "x": at, "yref": "paper", "y": 0, "text": name}


def _level(figure: Figure, name: str, size: int, scale: Scale) -> None:
    """A line across the picture for what a device has or a plan may fill."""
    at = short(size / scale.size)
    colour = "@alarm" if name == "capacity" else "@keep"
    layout = figure["layout"]
    text = {"showarrow": False, "font": {"color": f"{colour}-text"}, "xref": "paper", "x": 1, "xanchor": "right"}
    line = {"color": colour, "width": 1, "dash": "dash"}
    layout["shapes"].append(
        {"type": "line", "xref": "paper", "yref": "y", "x0": 0, "x1": 1, "y0": at, "y1": at, "line": line}
    )
    anchor = "bottom" if name == "capacity" else "top"
    layout["annotations"].append({**text, "y": at, "yanchor": anchor, "text": f"{name} {format_bytes(size)}"})


def _thinned(steps: Sequence[AdaptStep]) -> Sequence[AdaptStep]:
    """Few enough steps for a picture: of each few the one that reserved most, and all in which something failed."""
    if len(steps) <= MOST_STEPS:
        return steps
    size = -(-len(steps) // MOST_STEPS)
    kept: list[AdaptStep] = []
    for start in range(0, len(steps), size):
        few = steps[start : start + size]
        most = max(few, key=lambda step: (step.peak_reserved, step.seconds))
        kept += [step for step in few if step is most or step.rescued]
    return kept


def _middle(numbers: Sequence[float]) -> float:
    return sorted(numbers)[len(numbers) // 2]

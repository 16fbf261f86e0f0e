"""One offline HTML file from a sweep: four pictures over the values, and the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from lowtide.planner.plan import Plan
from lowtide.planner.simulation import StageSimulation
from lowtide.report.axes import Figure, byte_scale, short, time_scale
from lowtide.report.frame import chart, framed, section, two, unbroken
from lowtide.report.sweep import HEADINGS, Sweep, SweepRow, cells, details, tick
from lowtide.report.tables import listed
from lowtide.report.words import held_by_decision, layout
from lowtide.units import format_bytes, format_seconds

__all__ = ["sweep_page", "write_sweep_page"]

TITLES = {"budget": "the budget", "seq": "tokens of a sample", "devices": "devices"}


def write_sweep_page(file: str | Path, sweep: Sweep) -> None:
    """Write the page of a sweep into a file."""
    Path(file).write_text(sweep_page(sweep), encoding="utf-8")


def sweep_page(sweep: Sweep) -> str:
    """The page as HTML text. It asks no other host for anything."""
    figures = {
        "sweep_step": _line_figure(sweep, "step"),
        "sweep_rate": _line_figure(sweep, "rate"),
        "sweep_memory": _memory_figure(sweep),
        "sweep_decisions": _decisions_figure(sweep),
    }
    plans = [row.plan for row in sweep.rows if row.plan is not None]
    # What every value has in common is the same text; one that differs is in the table.
    common = {layout(plan) for plan in plans}
    where = common.pop() if len(common) == 1 else sweep.device
    head = (
        f'<header><p class="where"><b>lowtide</b> · {escape(sweep.model)} · {escape(where)}</p>'
        f"<h1>{unbroken(escape(sweep.sentence))}</h1></header>\n"
    )
    speed = section(
        "speed",
        "Speed",
        "The fastest plan for each value, as the simulator counts. A gap is a value that nothing fits.",
        two(
            "<h3>Time of a step</h3>" + chart("sweep_step", "time of a step for each value"),
            "<h3>Tokens a second, with MFU</h3>" + chart("sweep_rate", "tokens a second for each value"),
        ),
    )
    memory = section(
        "memory",
        "Memory, and what is given up for it",
        "The fullest device at its peak; and what becomes of a micro-batch's activations, all layers together.",
        two(
            "<h3>Memory of the fullest device</h3>" + chart("sweep_memory", "memory for each value"),
            "<h3>Activations</h3>" + chart("sweep_decisions", "decisions for each value"),
        ),
    )
    table = section(
        "values",
        "Every value",
        "Below each, the largest operators that are recomputed or swapped, and in how many layers.",
        _table(sweep),
    )
    notes = list(dict.fromkeys(note for plan in plans for note in plan.notes if "nothing fits" not in note))
    trust = (
        '<div class="honesty" id="honesty"><h2>How far to trust this</h2>'
        f"{listed(['All of this is predicted. Nothing on this page was measured on a device.'])}"
        f"{f'<h3>Assumed</h3>{listed(notes)}' if notes else ''}</div>\n"
    )
    return framed(sweep.sentence, head + speed + memory + table + trust, figures)


def _names(sweep: Sweep) -> list[str]:
    """The values on the axis."""
    return [tick(sweep.axis, row.value) for row in sweep.rows]


def _layout(sweep: Sweep, unit: str, height: int = 320) -> Figure:
    """Values across, each where its name is, and a word where nothing fits."""
    names = _names(sweep)
    return {
        "height": height,
        "xaxis": {
            "type": "category",
            "title": {"text": TITLES[sweep.axis]},
            "categoryorder": "array",
            "categoryarray": names,
            "range": [-0.5, len(names) - 0.5],
            "showgrid": False,
        },
        "yaxis": {"ticksuffix": f" {unit}" if unit else "", "nticks": 6, "rangemode": "tozero"},
        "annotations": [
            {
                "x": name,
                "y": 0,
                "yref": "paper",
                "yanchor": "bottom",
                "text": "does not<br>fit" if row.plan is not None else "no plan",
                "showarrow": False,
                "font": {"color": "@alarm-text"},
            }
            for name, row in zip(names, sweep.rows, strict=True)
            if row.fits is None
        ],
    }


def _line_figure(sweep: Sweep, what: str) -> Figure:
    """The time of a step, or tokens a second with MFU written at each point."""
    plans = [row.fits for row in sweep.rows]
    time = time_scale(max((plan.simulation.seconds for plan in plans if plan is not None), default=0.0))

    def height(plan: Plan | None) -> float | None:
        if plan is None or (what == "rate" and plan.tokens_per_second is None):
            return None
        return short(plan.simulation.seconds / time.size if what == "step" else plan.tokens_per_second or 0.0)

    def label(plan: Plan | None) -> str:
        if plan is None:
            return ""
        return f"{plan.mfu:.1%}" if what == "rate" and plan.mfu is not None else format_seconds(plan.simulation.seconds)

    heights = [height(plan) for plan in plans]
    line = {
        "type": "scatter",
        "mode": "lines+markers+text",
        "name": what,
        "x": _names(sweep),
        "y": heights,
        "text": [label(plan) for plan in plans],
        "textposition": "top center",
        "cliponaxis": False,
        "connectgaps": False,
        "customdata": [_hover(row) for row in sweep.rows],
        "hovertemplate": "%{x}: %{customdata}<extra></extra>",
        "line": {"color": "@keep", "width": 2},
        "marker": {"size": 9, "color": "@swap"},
    }
    figure = _layout(sweep, time.unit if what == "step" else "")
    figure["yaxis"]["range"] = [0, 1.18 * max((one for one in heights if one is not None), default=1.0)]
    return {"data": [line], "layout": figure, "narrow": {"yaxis.nticks": 4}}


def _hover(row: SweepRow) -> str:
    plan = row.fits
    if plan is None:
        return ""
    rate = f", {plan.tokens_per_second:,.0f} tokens/s" if plan.tokens_per_second is not None else ""
    mfu = f", MFU {plan.mfu:.1%}" if plan.mfu is not None else ""
    return f"{format_seconds(plan.simulation.seconds)} a step{rate}{mfu}"


class _Part(NamedTuple):
    name: str
    colour: str
    sizes: Sequence[int | None]


def _memory_figure(sweep: Sweep) -> Figure:
    """What the fullest device holds, and the budget."""
    stages = [
        max(row.fits.simulation.stages, key=lambda stage: stage.reserved) if row.fits is not None else None
        for row in sweep.rows
    ]

    def part(name: str, colour: str, size: Callable[[StageSimulation], int]) -> _Part:
        return _Part(name, colour, [size(stage) if stage is not None else None for stage in stages])

    parts = [
        part("weights, gradients, optimizer", "@deep", lambda stage: stage.static),
        part("activations and buffers", "@keep", lambda stage: stage.peak - stage.static),
        part("reserved, not in use", "@line", lambda stage: stage.reserved - stage.peak),
    ]
    budgets = [row.plan.budget if row.plan is not None and row.plan.bounded else None for row in sweep.rows]
    highest = max([stage.reserved for stage in stages if stage is not None] + [one for one in budgets if one] or [1])
    figure = _stack(sweep, parts, highest)
    scale = byte_scale(highest)
    if any(budgets):
        figure["data"].append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "budget",
                "x": _names(sweep),
                "y": [short(one / scale.size) if one else None for one in budgets],
                "marker": {"symbol": "line-ew-open", "size": 26, "line": {"width": 2}, "color": "@alarm"},
                "hovertemplate": f"budget %{{y}} {scale.unit}<extra></extra>",
            }
        )
    return figure


def _decisions_figure(sweep: Sweep) -> Figure:
    """What becomes of a micro-batch's activations."""
    held = [held_by_decision(row.fits) if row.fits is not None else None for row in sweep.rows]
    parts = [
        _Part("kept", "@keep", [one and one.keep for one in held]),
        _Part("recomputed", "@recompute", [one and one.recompute for one in held]),
        _Part("swapped", "@swap", [one and one.swap for one in held]),
    ]
    return _stack(sweep, parts, max((sum(one) for one in held if one is not None), default=1))


def _stack(sweep: Sweep, parts: Sequence[_Part], highest: int) -> Figure:
    scale = byte_scale(highest)
    bars = [
        {
            "type": "bar",
            "name": part.name,
            "x": _names(sweep),
            "y": [short(size / scale.size) if size is not None else None for size in part.sizes],
            "marker": {"color": part.colour},
            "text": [format_bytes(size) if size is not None else "" for size in part.sizes],
            "textposition": "none",
            "hovertemplate": f"%{{text}} {part.name}<extra>%{{x}}</extra>",
        }
        for part in parts
        if any(part.sizes)
    ]
    stacked = {**_layout(sweep, scale.unit), "barmode": "stack", "bargap": 0.35, "showlegend": True}
    return {"data": bars, "layout": stacked, "narrow": {"yaxis.nticks": 4}}


def _table(sweep: Sweep) -> str:
    """Every figure, and in words what is recomputed and swapped."""
    head = "".join(f"<th>{escape(one)}</th>" for one in (sweep.axis, *HEADINGS))
    rows = "".join(
        "<tr>"
        + f"<td>{escape(tick(sweep.axis, row.value))}</td>"
        + "".join(f"<td{'' if row.fits is not None else ' class=over'}>{escape(cell)}</td>" for cell in cells(row))
        + f'</tr><tr class="details"><td colspan="{len(HEADINGS) + 1}">{escape(details(row))}</td></tr>'
        for row in sweep.rows
    )
    table = f'<table class="layouts sweep"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    return f'<div class="scroll">{table}</div>'

"""Plans for several budgets, sequence lengths or numbers of devices: as a table on a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lowtide.planner.plan import Plan
from lowtide.report.words import Decided, decided, held_by_decision
from lowtide.units import format_bytes, format_seconds

__all__ = ["Axis", "Sweep", "SweepRow", "cells", "details", "print_sweep", "sweep_as_json", "tick", "value_text"]

Axis: TypeAlias = Literal["budget", "seq", "devices"]
HEADINGS = ("step", "tokens/s", "MFU", "peak", "reserved", "kept", "recomputed", "swapped")
LESS, WIDE = ("peak", "kept"), 104
"""Columns that a terminal narrower than so many characters is not given."""
UNITS: dict[Axis, str] = {"budget": "", "seq": " tokens", "devices": " devices"}
LEGEND = (
    "peak and reserved are the fullest device's; kept, recomputed and swapped are of a micro-batch's activations in all"
    " layers; below, the largest operators and in how many layers"
)
MOST_OPERATORS = 3
"""Operators that are named for a value, the largest; the others are counted."""


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """One value, and the plan for it."""

    value: int
    plan: Plan | None = None
    """None where there is nothing to plan, such as a length that ranks cannot split."""
    error: str = ""
    """Why there is none."""
    layout: str = ""
    """The fastest layout, where it was searched for."""

    @property
    def fits(self) -> Plan | None:
        """The plan, if it fits."""
        return self.plan if self.plan is not None and self.plan.feasible else None

    @property
    def why(self) -> str:
        """Why it does not fit; empty where it does."""
        if self.plan is None:
            return self.error
        if self.plan.feasible:
            return ""
        least = self.plan.least
        return (
            f"the least that any policy needs is {format_bytes(least)}, {format_bytes(least - self.plan.budget)} more"
        )


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The plans of a model for values of one option, in their order."""

    model: str
    device: str
    axis: Axis
    rows: tuple[SweepRow, ...]

    @property
    def sentence(self) -> str:
        """What came out, in one sentence."""
        first, last = (value_text(self.axis, row.value) for row in (self.rows[0], self.rows[-1]))
        fitting = [plan for row in self.rows if (plan := row.fits) is not None]
        count = f"{len(fitting)} of {len(self.rows)} fit" if len(fitting) < len(self.rows) else "all fit"
        steps = [plan.simulation.seconds for plan in fitting]
        times = " to ".join(dict.fromkeys(format_seconds(one) for one in (max(steps), min(steps)))) if steps else ""
        return f"{self.model} with {first} to {last}: {count}" + (f", {times} a step" if steps else "")


def tick(axis: Axis, value: int) -> str:
    """A value in a column or on an axis that says what it is."""
    return format_bytes(value) if axis == "budget" else f"{value:,}"


def value_text(axis: Axis, value: int) -> str:
    """A value in a sentence."""
    return tick(axis, value) + UNITS[axis]


def cells(row: SweepRow) -> tuple[str, ...]:
    """The figures of a row, one for each heading; none of a value that does not fit."""
    plan = row.fits
    if plan is None:
        return ("does not fit" if row.plan is not None else "no plan", *[""] * (len(HEADINGS) - 1))
    simulation = plan.simulation
    return (
        format_seconds(simulation.seconds),
        f"{plan.tokens_per_second:,.0f}" if plan.tokens_per_second is not None else "",
        f"{plan.mfu:.1%}" if plan.mfu is not None else "",
        format_bytes(simulation.peak),
        format_bytes(simulation.reserved),
        *(format_bytes(size) if size else "" for size in held_by_decision(plan)),
    )


def details(row: SweepRow) -> str:
    """The layout and what is recomputed and swapped in words, or why there is no plan that fits."""
    if row.fits is None:
        return row.why
    return "; ".join(filter(None, (row.layout, *_decided(row.fits)))) or "everything is kept"


def _decided(plan: Plan) -> Iterator[str]:
    found = decided(plan)
    for kind in ("recompute", "swap"):
        some = [one for one in found if one.kind == kind]
        named = [f"{one.name} in {one.layers}" if one.name else f"{one.layers} whole" for one in some]
        if named:
            more = f" and {len(some) - MOST_OPERATORS} smaller" if len(some) > MOST_OPERATORS else ""
            yield f"{kind} {', '.join(named[:MOST_OPERATORS])}{more}"


def print_sweep(sweep: Sweep, console: Console) -> None:
    """A line of figures for each value, then what is recomputed and swapped for each."""
    console.print(Text(sweep.sentence, style="bold"), soft_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    left_out = LESS if console.width < WIDE else ()
    table.add_column(sweep.axis, justify="right", no_wrap=True)
    for heading in HEADINGS:
        if heading not in left_out:
            table.add_column(heading, justify="right", no_wrap=True)
    for row in sweep.rows:
        figures = [cell for name, cell in zip(HEADINGS, cells(row), strict=True) if name not in left_out]
        table.add_row(tick(sweep.axis, row.value), *figures, style="" if row.fits is not None else "red")
    console.print(table)
    console.print(Text(LEGEND, style="dim"), soft_wrap=True)
    for row in sweep.rows:
        console.print(Text.assemble((value_text(sweep.axis, row.value), "bold"), f": {details(row)}"), soft_wrap=True)


def sweep_as_json(sweep: Sweep) -> dict[str, Any]:
    """The same, as plain JSON values, with all operators."""
    return {
        "model": sweep.model,
        "device": sweep.device,
        "sweep": sweep.axis,
        "rows": [{"value": row.value, **_row_as_json(row)} for row in sweep.rows],
    }


def _row_as_json(row: SweepRow) -> dict[str, Any]:
    plan = row.fits
    if plan is None:
        return {"fits": False, "why": row.why, "least": row.plan.least if row.plan is not None else None}
    stages = plan.simulation.stages
    return {
        "fits": True,
        "layout": row.layout or None,
        "budget": plan.budget,
        "step_s": plan.simulation.seconds,
        "tokens_per_second": plan.tokens_per_second,
        "mfu": plan.mfu,
        "bound_s": plan.bound,
        "peak": plan.simulation.peak,
        "reserved": plan.simulation.reserved,
        "recompute_s": max(stage.recompute for stage in stages),
        "stall_s": max(stage.stall for stage in stages),
        "moved": sum(stage.moved for stage in stages),
        "activations": held_by_decision(plan)._asdict(),
        "decided": [_decided_as_json(one) for one in decided(plan)],
        "policy": plan.policy.digest,
    }


def _decided_as_json(one: Decided) -> dict[str, Any]:
    return {"decision": one.kind, "operator": one.name or None, "layers": one.layers, "bytes": one.bytes}

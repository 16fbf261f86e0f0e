"""The layouts that a search found, as a table, as JSON and as a part of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rich.console import Console
from rich.table import Table

from lowtide.units import format_bytes, format_seconds

__all__ = ["LayoutRow", "LayoutsFound", "layouts_as_json", "layouts_table", "print_layouts"]


@dataclass(frozen=True, kw_only=True)
class LayoutRow:
    """One layout that fits."""

    layout: str
    seconds: float
    tokens_per_second: float
    mfu: float | None
    reserved: int
    recompute: float
    """Share of the step that the busiest stage recomputes."""
    bubble: float


@dataclass(frozen=True, kw_only=True)
class LayoutsFound:
    """What a search found, for people."""

    rows: Sequence[LayoutRow]
    """The fastest first."""
    reasons: Mapping[str, int]
    """Why others fell away, and how many."""
    traced: int
    looked_at: int
    """All layouts that were considered."""
    seconds: float
    proved: bool
    """Whether every other layout was planned, or cannot be faster, as the simulator counts."""

    @property
    def sentence(self) -> str:
        """What was looked at."""
        end = "the others were planned or cannot be faster" if self.proved else "the time was up before all were"
        took = format_seconds(self.seconds)
        return f"{self.looked_at} layouts considered, {self.traced} simulated, in {took}; {end}"


HEADINGS = ("layout", "step", "tokens/s", "MFU", "reserved", "recomputing", "bubble")


def _cells(row: LayoutRow) -> tuple[str, ...]:
    return (
        row.layout,
        format_seconds(row.seconds),
        f"{row.tokens_per_second:,.0f}",
        f"{row.mfu:.1%}" if row.mfu is not None else "",
        format_bytes(row.reserved),
        f"{row.recompute:.1%}",
        f"{row.bubble:.1%}",
    )


def print_layouts(found: LayoutsFound, console: Console, most: int = 10) -> None:
    """A table of the best, and why the others fell away."""
    table = Table(box=None, pad_edge=False)
    for number, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if number else "left", no_wrap=not number)
    for row in found.rows[:most]:
        table.add_row(*_cells(row))
    console.print(table)
    console.print(found.sentence)
    for why, count in found.reasons.items():
        console.print(f"left out: {count}, {why}")


def layouts_as_json(found: LayoutsFound, most: int = 10) -> dict[str, Any]:
    """The same, as plain JSON values."""
    return {
        "layouts": [
            {
                "layout": row.layout,
                "step_s": row.seconds,
                "tokens_per_second": row.tokens_per_second,
                "mfu": row.mfu,
                "reserved": row.reserved,
            }
            for row in found.rows[:most]
        ],
        "considered": found.looked_at,
        "simulated": found.traced,
        "left_out": dict(found.reasons),
        "seconds": found.seconds,
        "proved": found.proved,
    }


def layouts_table(found: LayoutsFound, most: int = 10) -> str:
    """The table of a page, and why others fell away."""
    head = "".join(f"<th>{escape(one)}</th>" for one in HEADINGS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in _cells(row)) + "</tr>" for row in found.rows[:most]
    )
    reasons = "".join(f"<li>{count}: {escape(why)}</li>" for why, count in found.reasons.items())
    table = f"<table class='layouts'><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div class="scroll">{table}</div><p>Left out:</p><ul>{reasons}</ul>'

"""Axes: units that give a person numbers to read, and the budget's line.

Figures are plotly's plain JSON, traces and layout, without plotly. Colours are names such as ``@swap``; the page's script
gives them the values of its style sheet, light or dark. A figure may have ``narrow``: layout, by dotted path, that
replaces the other on a small screen.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

__all__ = ["Figure", "Scale", "budget_label", "budget_line", "byte_scale", "short", "time_scale"]

Figure: TypeAlias = dict[str, Any]


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


def budget_line(at: float, *, upright: bool) -> Figure:
    """A dashed line across the picture, or upright in it."""
    across = {"xref": "paper", "yref": "y", "x0": 0, "x1": 1, "y0": at, "y1": at}
    up = {"xref": "x", "yref": "paper", "x0": at, "x1": at, "y0": 0, "y1": 1}
    return {"type": "line", **(up if upright else across), "line": {"color": "@alarm", "width": 1, "dash": "dash"}}


def budget_label(text: str, **where: Any) -> Figure:
    """What stands at the line."""
    return {"yanchor": "bottom", "showarrow": False, "text": text, "font": {"color": "@alarm-text"}, **where}


def short(number: float) -> float:
    """Five digits are more than a picture shows, and half the page's size."""
    return float(f"{number:.5g}")

"""Axes: units that give a person numbers to read, and the budget's line.

Figures are plotly's plain JSON, traces and layout, without plotly. Colours are names such as ``@swap``; the page's
script gives them the values of its style sheet, light or dark. A figure may have ``narrow``: layout, by dotted path,
that replaces the other on a small screen; and ``narrow_data``, what is replaced in the traces there, by their names.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from lowtide.units import format_bytes

__all__ = ["FAR", "BudgetMarks", "Figure", "Scale", "budget_marks", "byte_scale", "short", "time_scale"]

Figure: TypeAlias = dict[str, Any]

FAR = 2.5
"""A budget of so many times what there is to show is far above it."""


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


class BudgetMarks(NamedTuple):
    """The budget in a picture."""

    shapes: list[Figure]
    labels: list[Figure]


def budget_marks(budget: int | None, highest: int, scale: Scale, *, upright: bool) -> BudgetMarks:
    """A dashed line across the picture, or upright in it. Far above everything else it would flatten the picture: then
    it is only said."""
    if budget is None:
        return BudgetMarks([], [])
    text = {"showarrow": False, "yanchor": "bottom", "font": {"color": "@alarm-text"}}
    if budget > FAR * highest:
        corner = {"xref": "paper", "x": 1, "xanchor": "right", "yref": "paper", "y": 1}
        return BudgetMarks([], [{**text, **corner, "text": f"the budget, {format_bytes(budget)}, is far above"}])
    at = short(budget / scale.size)
    across = {"xref": "paper", "yref": "y", "x0": 0, "x1": 1, "y0": at, "y1": at}
    up = {"xref": "x", "yref": "paper", "x0": at, "x1": at, "y0": 0, "y1": 1}
    dash = {"color": "@alarm", "width": 1, "dash": "dash"}
    where = {"x": at, "y": 1, "yref": "paper"} if upright else {"x": 1, "xref": "paper", "y": at, "xanchor": "right"}
    line = {"type": "line", **(up if upright else across), "line": dash}
    return BudgetMarks([line], [{**text, **where, "text": f"budget {format_bytes(budget)}"}])


def short(number: float) -> float:
    """Five digits are more than a picture shows, and half the page's size."""
    return float(f"{number:.5g}")

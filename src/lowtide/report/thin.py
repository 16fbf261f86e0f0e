"""Long timelines made short enough to draw, without losing what they are looked at for.

[Note: thinning]
A step may have hundreds of thousands of moments; a screen has some thousand columns. Time is cut into equal slices, and
of each slice the first, the highest and the lowest moment stay, as they are and in their order. So the peak is always
there, at its own time and under its own name, and no point is drawn that was not simulated.

Spans of one row and kind that follow each other closer than a screen can show become one block. A block knows how long
it was really busy, and is drawn the fainter the less that is of its length, so that joining never makes a row look
busier than it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lowtide.planner.simulation import Moment, Span
from lowtide.policy import format_layers

__all__ = ["ROWS", "Block", "blocks", "late_copies", "thin_memory", "thin_points"]

SLICES = 800
"""Slices of a memory timeline: at most three times as many moments stay."""
MOST_BLOCKS = 2000
"""Of one stage. More make a page slow to open."""
ROWS = {
    "forward": "compute",
    "backward": "compute",
    "optimizer": "compute",
    "recompute": "recompute",
    "collective": "collectives",
    "stall": "stalls",
    "copy out": "link out",
    "copy back": "link in",
    "late": "link in",
}
"""The row that a kind of span is drawn in, from the top."""


class Block(NamedTuple):
    """Neighbouring spans of one kind."""

    row: str
    kind: str
    """A span's, or ``late`` for copies back that the computation waited for."""
    start: float
    end: float
    busy: float
    """The seconds of the spans themselves."""
    spans: int
    bytes: int
    layers: str
    """Whose they are: ``4-7``; empty for what is outside the layers."""
    operator: str
    """The operator, if there is only one."""


def thin_memory(moments: Sequence[Moment], slices: int = SLICES) -> tuple[Moment, ...]:
    """At most three moments a slice of time, the highest among them: see [Note: thinning]."""
    return tuple(moments[place] for place in _thin([(one.time, one.allocated) for one in moments], slices))


def thin_points(points: Sequence[tuple[float, int]], slices: int = SLICES) -> list[tuple[float, int]]:
    """The same for plain points of time and bytes."""
    return [points[place] for place in _thin(points, slices)]


def late_copies(spans: Iterable[Span]) -> set[Span]:
    """The copies back that compute waited for until they had ended."""
    spans = list(spans)
    stalls: dict[tuple[int | None, str, int], list[Span]] = {}
    for span in spans:
        if span.kind == "stall":
            stalls.setdefault(_whose(span), []).append(span)
    return {
        copy
        for copy in spans
        if copy.kind == "copy back"
        and any(stall.start < _end(copy) <= _end(stall) * (1 + 1e-9) for stall in stalls.get(_whose(copy), ()))
    }


def _whose(span: Span) -> tuple[int | None, str, int]:
    return span.layer, span.operator, span.micro_batch


def blocks(spans: Iterable[Span], seconds: float, most: int = MOST_BLOCKS) -> list[Block]:
    """Spans joined where a picture cannot show them apart: see [Note: thinning]."""
    spans = sorted(spans, key=lambda span: span.start)
    late = late_copies(spans)
    slices = 2000
    while True:
        result = _joined(spans, late, seconds / slices)
        if len(result) <= most or slices < 50:
            return result
        slices //= 2


def _joined(spans: Iterable[Span], late: set[Span], close: float) -> list[Block]:
    groups: dict[str, list[Span]] = {}
    done: list[Block] = []
    for span in spans:
        kind = "late" if span in late else span.kind
        group = groups.setdefault(kind, [])
        if group and span.start - _end(group[-1]) > close:
            done.append(_block(kind, group))
            group.clear()
        group.append(span)
    done += [_block(kind, group) for kind, group in groups.items()]
    return done


def _block(kind: str, group: Sequence[Span]) -> Block:
    names = {span.operator for span in group}
    return Block(
        row=ROWS[kind],
        kind=kind,
        start=group[0].start,
        end=max(map(_end, group)),
        busy=sum(span.seconds for span in group),
        spans=len(group),
        bytes=sum(span.bytes for span in group),
        layers=format_layers(sorted({span.layer for span in group if span.layer is not None})),
        operator=names.pop() if len(names) == 1 else "",
    )


def _end(span: Span) -> float:
    return span.start + span.seconds


def _thin(points: Sequence[tuple[float, int]], slices: int) -> list[int]:
    """The places of the points that stay."""
    if len(points) <= 3 * slices:
        return list(range(len(points)))
    first, last = points[0][0], points[-1][0]
    width = (last - first) / slices or 1.0
    sliced: dict[int, list[int]] = {}
    for place, (time, _) in enumerate(points):
        sliced.setdefault(min(int((time - first) / width), slices - 1), []).append(place)
    kept = {len(points) - 1}
    for places in sliced.values():
        kept |= {places[0], max(places, key=lambda i: points[i][1]), min(places, key=lambda i: points[i][1])}
    return sorted(kept)

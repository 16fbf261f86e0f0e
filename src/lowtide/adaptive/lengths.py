"""Batches of different lengths: the Trace of a length that was not measured, from those that were. No torch here.

What a layer saves and computes is a polynomial of the length of a batch: some of it is constant, such as the gradients
of parameters, some grows with every token, and attention with every pair of them. Three measured lengths determine it.
Times are noisy, which such a curve would amplify: they are interpolated linearly between their two neighbours.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple, TypeVar

from lowtide.trace.trace import Kernel, Part, Trace

__all__ = ["RATIO", "Lengths", "bucket_of"]

RATIO = 1.25
"""Between two lengths that plans are made for."""
ENOUGH = 3
"""Measured lengths that determine the polynomial."""
Row = TypeVar("Row")


def bucket_of(tokens: int) -> int:
    """The length that a batch of so many tokens is planned as: the next of a geometric series.

    >>> [bucket_of(tokens) for tokens in (1, 64, 100, 1000)]
    [1, 69, 108, 1009]
    """
    bucket = 1.0
    while int(bucket) < tokens:
        bucket *= RATIO
    return int(bucket)


class Lengths:
    """The Traces of measured lengths."""

    def __init__(self) -> None:
        self.traces: dict[int, Trace] = {}

    def wanted(self, tokens: int) -> bool:
        """Whether this length should be measured: it is the longest so far, or one more for the polynomial.

        The longer a run, the less often a new batch is the longest.
        """
        if tokens > max(self.traces, default=0):
            return True
        apart = all(not one / RATIO < tokens < one * RATIO for one in self.traces)
        return len(self.traces) < ENOUGH and apart

    def add(self, tokens: int, trace: Trace) -> None:
        """Add the Trace of a measured length."""
        self.traces[tokens] = trace

    def bucket(self, tokens: int) -> int:
        """The length that a batch of so many tokens is planned as: at most the longest that was measured."""
        longest = max(self.traces, default=0)
        return min(bucket_of(tokens), longest) if tokens <= longest else bucket_of(tokens)

    def trace(self, tokens: int) -> Trace | None:
        """The Trace of a batch of so many tokens; None if it is longer than any that was measured."""
        known = sorted(self.traces)
        if not known or tokens > known[-1]:
            return None
        if tokens in self.traces:
            return self.traces[tokens]
        above = max(1, bisect_left(known, tokens))
        pair = known[above - 1 : above + 1]
        if len(pair) < 2:
            return self.traces[known[-1]]
        third = (*known[above + 1 :], *reversed(known[: above - 1]))[: ENOUGH - 2]
        curve = sorted((*pair, *third))
        line = dict(zip(pair, _polynomial(pair, tokens), strict=True))
        weights = _Weights(_polynomial(curve, tokens), tuple(line.get(one, 0.0) for one in curve))
        return _mixed([self.traces[one] for one in curve], weights)


class _Weights(NamedTuple):
    """The weight of each Trace in an interpolation."""

    curve: tuple[float, ...]
    """For bytes and work, a polynomial of the length."""
    line: tuple[float, ...]
    """For seconds, which are noisy."""

    def whole(self, numbers: Sequence[float]) -> int:
        return max(0, self.signed(numbers))

    def signed(self, numbers: Sequence[float]) -> int:
        return round(sum(weight * number for weight, number in zip(self.curve, numbers, strict=True)))

    def seconds(self, numbers: Sequence[float | None]) -> float | None:
        known = [number for number in numbers if number is not None]
        if len(known) < len(numbers):
            return None
        return max(0.0, sum(weight * number for weight, number in zip(self.line, known, strict=True)))


def _polynomial(known: Sequence[int], tokens: int) -> tuple[float, ...]:
    """The weights by which values at ``known`` lengths give the value at ``tokens``, on the curve through them all."""
    return tuple(prod((tokens - other) / (one - other) for other in known if other != one) for one in known)


def _mixed(traces: Sequence[Trace], weights: _Weights) -> Trace:
    """The interpolated Trace; the last one, which is the longest, if they did not run the same kernels."""
    longest = traces[-1]
    if len({_outline(one) for one in traces}) > 1:
        return longest
    parts = zip(*(one.parts for one in traces), strict=True)
    batch = {name: weights.whole([one.batch.get(name, 0) for one in traces]) for name in longest.batch}
    return replace(
        longest,
        before=_part([one.before for one in traces], weights),
        after=_part([one.after for one in traces], weights),
        parts=tuple(_part(rows, weights) for rows in parts),
        batch=batch,
    )


def _outline(trace: Trace) -> tuple[object, ...]:
    """What two Traces of the same steps have in common, whatever their lengths."""
    parts = (trace.before, *trace.parts, trace.after)
    return trace.layers, *(
        (len(part.values), *(one.kind for one in part.kernels), *(one.name for one in part.operators)) for part in parts
    )


def _part(parts: Sequence[Part], weights: _Weights) -> Part:
    return replace(
        parts[-1],
        values=_rows([one.values for one in parts], lambda row: row[-1]._replace(size=weights.whole(_of(row, "size")))),
        kernels=_rows([one.kernels for one in parts], lambda row: _kernel(row, weights)),
        operators=_rows(
            [one.operators for one in parts],
            lambda row: row[-1]._replace(owned=weights.whole(_of(row, "owned")), net=weights.signed(_of(row, "net"))),
        ),
    )


def _kernel(row: Sequence[Kernel], weights: _Weights) -> Kernel:
    return row[-1]._replace(
        flops=weights.whole(_of(row, "flops")),
        touched=weights.whole(_of(row, "touched")),
        message=weights.whole(_of(row, "message")),
        seconds=weights.seconds([one.seconds for one in row]),
    )


def _rows(columns: Sequence[Sequence[Row]], one: Callable[[Sequence[Row]], Row]) -> tuple[Row, ...]:
    return tuple(one(row) for row in zip(*columns, strict=True))


def _of(row: Sequence[object], name: str) -> list[int]:
    return [getattr(one, name) for one in row]

"""Batches of different lengths: a Trace for one that was not measured, from two that were. No torch here.

What a layer saves grows with the length of a batch in a straight line: some of it with every token, some not at all,
such as gradients of parameters. Two measured lengths show which. Seconds are taken to do the same, which leaves out
that attention grows faster; the error is small between the two, and what was planned is checked against what happens.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from lowtide.trace.trace import Kernel, Part, Trace, Value

__all__ = ["RATIO", "Lengths", "bucket_of"]

RATIO = 1.25
"""Between the lengths that plans are made for."""


def bucket_of(tokens: int) -> int:
    """The length that a batch of so many tokens is planned as: the next of a geometric row.

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
        """Whether this length should be measured: it is longer than what is known, or a second one to compare with."""
        if not self.traces:
            return True
        shortest, longest = min(self.traces), max(self.traces)
        return tokens > longest * RATIO or (shortest == longest and not shortest / RATIO < tokens < longest * RATIO)

    def add(self, tokens: int, trace: Trace) -> None:
        """A length was measured."""
        self.traces[tokens] = trace

    def trace(self, tokens: int) -> Trace | None:
        """What a batch of so many tokens does; None if nothing is known of one so long."""
        known = sorted(self.traces)
        if not known or tokens > known[-1] * RATIO:
            return None
        if tokens in self.traces or len(known) == 1:
            return self.traces[tokens] if tokens in self.traces else self.traces[known[-1]]
        above = min(max(1, bisect_left(known, tokens)), len(known) - 1)
        one, other = known[above - 1], known[above]
        return _between(self.traces[one], self.traces[other], (tokens - one) / (other - one))


def _between(one: Trace, other: Trace, share: float) -> Trace:
    """A Trace on the line through two, ``share`` of the way from the first to the second; the second's if they do not
    do the same."""
    pairs = list(zip(one.parts, other.parts, strict=False))
    ends = [(one.before, other.before), (one.after, other.after), (one.optimizer, other.optimizer)]
    if one.layers != other.layers or not all(_alike(*pair) for pair in pairs + ends[:2]):
        return other
    before, after = (_part_between(*pair, share) for pair in ends[:2])
    parts = tuple(_part_between(*pair, share) for pair in pairs)
    batch = {name: round(_line(one.batch.get(name, 0), value, share)) for name, value in other.batch.items()}
    return replace(other, before=before, after=after, parts=parts, batch=batch)


def _alike(one: Part, other: Part) -> bool:
    kinds = ([kernel.kind for kernel in part.kernels] for part in (one, other))
    return len(one.values) == len(other.values) and next(kinds) == next(kinds)


def _part_between(one: Part, other: Part, share: float) -> Part:
    values = tuple(_value(*pair, share) for pair in zip(one.values, other.values, strict=True))
    kernels = tuple(_kernel(*pair, share) for pair in zip(one.kernels, other.kernels, strict=True))
    owned = {name.name: name for name in one.operators}
    operators = tuple(
        operator._replace(
            owned=max(0, round(_line(owned[operator.name].owned, operator.owned, share))),
            net=round(_line(owned[operator.name].net, operator.net, share)),
        )
        if operator.name in owned
        else operator
        for operator in other.operators
    )
    return replace(other, values=values, kernels=kernels, operators=operators)


def _value(one: Value, other: Value, share: float) -> Value:
    return other._replace(size=max(0, round(_line(one.size, other.size, share))))


def _kernel(one: Kernel, other: Kernel, share: float) -> Kernel:
    seconds = None
    if one.seconds is not None and other.seconds is not None:
        seconds = max(0.0, _line(one.seconds, other.seconds, share))
    return other._replace(
        flops=max(0, round(_line(one.flops, other.flops, share))),
        touched=max(0, round(_line(one.touched, other.touched, share))),
        message=max(0, round(_line(one.message, other.message, share))),
        seconds=seconds,
    )


def _line(one: float, other: float, share: float) -> float:
    return one + (other - one) * share

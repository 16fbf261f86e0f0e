"""Batches of different shapes: the Trace of a shape that was not measured, from those that were. No torch here.

[Note: batches of different shapes]
The shape of a batch is that of the first tensor that the model is given. What a layer saves and computes is a
polynomial of it: some of it is constant, such as the gradients of parameters, some grows with every token, and
attention with every pair of tokens of a sample. Three measured shapes determine it, also beyond the largest of them.
Two do not: between them their line is above the polynomial, and beyond them a curve without a linear term is.

Times are noisy, which such a curve would amplify: the seconds of a kernel are interpolated by its work, between the two
measured shapes around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from math import log, prod
from typing import NamedTuple, TypeVar

from lowtide.trace.trace import Kernel, Part, Trace

__all__ = ["ENOUGH", "RATIO", "Lengths", "Shape", "are_apart", "bucket_of", "covers", "format_shape", "larger_of"]

RATIO = 1.25
"""Between two sizes that plans are made for."""
ENOUGH = 3
"""Measured shapes that determine the polynomial."""
Shape = tuple[int, ...]
Row = TypeVar("Row")


def bucket_of(size: int) -> int:
    """The size that a dimension of a batch is planned as: the next of a geometric series.

    >>> [bucket_of(size) for size in (1, 64, 100, 1000)]
    [1, 69, 108, 1009]
    """
    bucket = 1.0
    while int(bucket) < size:
        bucket *= RATIO
    return int(bucket)


def covers(shape: Shape, other: Shape) -> bool:
    """Whether no dimension of the other shape is larger.

    >>> covers((2, 8), (1, 8)), covers((2, 8), (1, 9)), covers((2, 8), (2,))
    (True, False, False)
    """
    return len(shape) == len(other) and all(its <= mine for mine, its in zip(shape, other, strict=True))


def are_apart(shape: Shape, other: Shape) -> bool:
    """Whether two shapes differ enough to be measured or planned apart.

    >>> are_apart((1, 100), (1, 120)), are_apart((1, 100), (1, 125))
    (False, True)
    """
    return len(shape) != len(other) or any(
        max(mine, its) >= RATIO * min(mine, its) for mine, its in zip(shape, other, strict=True) if mine != its
    )


def larger_of(shape: Shape, other: Shape) -> Shape:
    """The shape that covers both; the first where they cannot be compared."""
    return tuple(map(max, shape, other)) if len(shape) == len(other) else shape


def format_shape(shape: Shape) -> str:
    """The shape in words.

    >>> format_shape((8, 128))
    '8 x 128'
    """
    return " x ".join(map(str, shape))


class Lengths:
    """The Traces of measured shapes."""

    def __init__(self) -> None:
        self.traces: dict[Shape, Trace] = {}
        self.communicate = False
        """Whether ranks exchange something in the forward of a layer, so that none can run it alone."""

    @property
    def vary(self) -> bool:
        """Whether several shapes were measured, so that each has its plan."""
        return len(self.traces) > 1

    def add(self, shape: Shape, trace: Trace) -> None:
        """Add the Trace of a measured shape."""
        self.traces[shape] = trace
        self.communicate |= any(
            part.kernels[number].ranks > 1 for part in trace.parts for what, number in part.forward if what == "run"
        )

    def tell(self, shape: Shape) -> bool:
        """Whether those that were measured tell enough of a batch of this shape: it is much like the only one, or a
        Trace follows from several."""
        if not self.vary:
            return not any(are_apart(shape, one) for one in self.traces)
        known = [one for one in self.traces if len(one) == len(shape)]
        return shape in known or bool(_weights(known, shape)) or any(covers(one, shape) for one in known)

    def bucket(self, shape: Shape) -> Shape:
        """The shape that a batch is planned as: in no dimension more than the largest that was measured, unless it is.

        Where only one shape was measured, all batches are planned as that.
        """
        if not self.vary:
            return next(iter(self.traces), ())
        known = [one for one in self.traces if len(one) == len(shape)]
        if not known:
            return shape
        largest = [max(sizes) for sizes in zip(*known, strict=True)]
        return tuple(
            min(bucket_of(size), most) if size <= most else bucket_of(size)
            for size, most in zip(shape, largest, strict=True)
        )

    def between(self) -> Iterator[Shape]:
        """The shapes that batches between the smallest and the largest measured one are planned as, if one dimension
        varies; the two sizes above it too."""
        shapes = list(self.traces)
        varying = _varying(shapes)
        if len(varying) != 1:
            return
        (index,) = varying
        first, sizes = shapes[0], sorted(shape[index] for shape in shapes)
        size = sizes[0]
        while size <= sizes[-1] * RATIO**2:
            bucket = self.bucket((*first[:index], size, *first[index + 1 :]))
            yield bucket
            size = bucket[index] + 1

    def trace(self, shape: Shape) -> Trace | None:
        """The Trace of a batch of this shape; None if those that were measured do not tell."""
        if shape in self.traces:
            return self.traces[shape]
        known = sorted((one for one in self.traces if len(one) == len(shape)), key=lambda one: _distance(one, shape))
        weights = _weights(known, shape)
        chosen = sorted(weights, key=prod)
        if len({_outline(self.traces[one]) for one in chosen}) == 1:
            return _mixed([self.traces[one] for one in chosen], tuple(weights[one] for one in chosen))
        larger = min((one for one in known if covers(one, shape)), key=prod, default=None)
        return self.traces[larger] if larger is not None else None


def _distance(shape: Shape, other: Shape) -> float:
    return abs(log(max(1, prod(shape)) / max(1, prod(other))))


def _varying(shapes: Sequence[Shape]) -> list[int]:
    """The dimensions that are not the same in all shapes."""
    return [index for index, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]


def _weights(known: Sequence[Shape], shape: Shape) -> dict[Shape, float]:
    """The weights by which values at some of the known shapes, the first ones that tell, give the value at ``shape``;
    none if they do not tell."""
    varying = _varying([*known, shape])

    def terms(one: Shape) -> tuple[float, float, float]:
        """What the polynomial consists of, relative to ``shape``."""
        if len(varying) == 1:
            size = one[varying[0]] / shape[varying[0]]
            return 1.0, size, size * size
        size = prod(one) / prod(shape)
        return 1.0, size, size * size * shape[0] / one[0]

    if not all(shape) or not all(map(all, known)):
        return {}
    for chosen in combinations(known, ENOUGH):
        if weights := _solved([terms(one) for one in chosen]):
            return dict(zip(chosen, weights, strict=True))
    if len(known) == 2 and len(varying) == 1:
        first, second = (terms(one) for one in known)
        term = 2 if max(first[1], second[1]) < 1.0 else 1
        share = (1.0 - first[term]) / (second[term] - first[term])
        return dict(zip(known, (1.0 - share, share), strict=True))
    return {}


def _solved(rows: Sequence[tuple[float, float, float]]) -> tuple[float, ...]:
    """The weights of three rows whose sum is (1, 1, 1), by Cramer's rule; none if the rows depend on each other."""

    def determinant(a: Sequence[float], b: Sequence[float], c: Sequence[float]) -> float:
        return (
            a[0] * (b[1] * c[2] - b[2] * c[1]) - a[1] * (b[0] * c[2] - b[2] * c[0]) + a[2] * (b[0] * c[1] - b[1] * c[0])
        )

    whole, one = determinant(*rows), (1.0, 1.0, 1.0)
    if abs(whole) <= 1e-9 * prod(max(map(abs, row)) for row in rows):
        return ()
    first, second, third = rows
    return (
        determinant(one, second, third) / whole,
        determinant(first, one, third) / whole,
        determinant(first, second, one) / whole,
    )


class _Weighted(NamedTuple):
    """The weight of each Trace in an interpolation."""

    weights: tuple[float, ...]

    def whole(self, numbers: Sequence[float]) -> int:
        return max(0, self.signed(numbers))

    def signed(self, numbers: Sequence[float]) -> int:
        return round(sum(weight * number for weight, number in zip(self.weights, numbers, strict=True)))


def _mixed(traces: Sequence[Trace], weights: tuple[float, ...]) -> Trace:
    """The interpolated Trace of several that ran the same kernels; the last one is the largest."""
    largest, weighted = traces[-1], _Weighted(weights)
    parts = zip(*(one.parts for one in traces), strict=True)
    batch = {name: weighted.whole([one.batch.get(name, 0) for one in traces]) for name in largest.batch}
    return replace(
        largest,
        before=_part([one.before for one in traces], weighted),
        after=_part([one.after for one in traces], weighted),
        parts=tuple(_part(rows, weighted) for rows in parts),
        batch=batch,
    )


def _outline(trace: Trace) -> tuple[object, ...]:
    """What two Traces of the same steps have in common, whatever their shapes."""
    parts = (trace.before, *trace.parts, trace.after)
    return trace.layers, *(
        (len(part.values), *(one.kind for one in part.kernels), *(one.name for one in part.operators)) for part in parts
    )


def _part(parts: Sequence[Part], weighted: _Weighted) -> Part:
    return replace(
        parts[-1],
        values=_rows(
            [one.values for one in parts], lambda row: row[-1]._replace(size=weighted.whole(_of(row, "size")))
        ),
        kernels=_rows([one.kernels for one in parts], lambda row: _kernel(row, weighted)),
        operators=_rows(
            [one.operators for one in parts],
            lambda row: row[-1]._replace(owned=weighted.whole(_of(row, "owned")), net=weighted.signed(_of(row, "net"))),
        ),
    )


def _kernel(row: Sequence[Kernel], weighted: _Weighted) -> Kernel:
    kernel = row[-1]._replace(
        flops=weighted.whole(_of(row, "flops")),
        touched=weighted.whole(_of(row, "touched")),
        message=weighted.whole(_of(row, "message")),
    )
    return kernel._replace(seconds=_seconds(row, _work(kernel)))


def _work(kernel: Kernel) -> int:
    return kernel.flops or kernel.touched or kernel.message


def _seconds(row: Sequence[Kernel], work: int) -> float | None:
    """What so much work of a kernel takes: on the line through the two measured points that are nearest, which does not
    fall; more work is never expected to take less."""
    measured = {_work(one): one.seconds for one in row if one.seconds is not None}
    if len(measured) < 2:
        return next(iter(measured.values()), None)
    known = sorted(measured)
    above = min(max(1, sum(one < work for one in known)), len(known) - 1)
    low, high = known[above - 1 : above + 1]
    slope = max(0.0, (measured[high] - measured[low]) / (high - low))
    return max(0.0, measured[low] + slope * (work - low))


def _rows(columns: Sequence[Sequence[Row]], one: Callable[[Sequence[Row]], Row]) -> tuple[Row, ...]:
    return tuple(one(row) for row in zip(*columns, strict=True))


def _of(row: Sequence[object], name: str) -> list[int]:
    return [getattr(one, name) for one in row]

"""Rates and efficiencies that explain measured kernels.

[Note: what can be found by measuring]
A kernel of a kind takes ``latency + max(flops / F, bytes / B) / e``, with the device's peaks F (for each dtype) and B,
and the kind's efficiency e. No measurement tells a peak from an efficiency: only their products show. What does show is
the ratio F / B, in a kind that has kernels bound by either, which is the matrix product. So B is the best rate of
memory that any kind reached, F follows from the matrix product's two rates, and the best kind has an efficiency of 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from lowtide.cost.kernel import kernel_class

__all__ = ["Fit", "Sample", "fit"]


class Sample(NamedTuple):
    """A kernel that was measured."""

    kind: str
    dtype: str
    flops: int
    touched: int
    """Bytes read and written."""
    seconds: float


class Fit(NamedTuple):
    """What explains the samples. See [Note: what can be found by measuring]."""

    flops: dict[str, float]
    """Operations per second, by dtype; empty if no sample has any."""
    memory_bandwidth: float
    efficiency: dict[str, float]
    """By kind, and by class."""


def fit(samples: Iterable[Sample], latency: float) -> Fit | None:
    """Explain the samples, given the time of an empty kernel; None if there is nothing to explain.

    >>> found = fit([Sample("aten::add", "float32", 0, 10**9, 1.0), Sample("aten::mul", "float32", 0, 10**9, 2.0)], 0.0)
    >>> found.memory_bandwidth, found.efficiency["aten::mul"]
    (1000000000.0, 0.5)
    """
    # What is hardly longer than nothing says little about a rate.
    seen = [one for one in samples if one.seconds > 1.2 * latency and (one.flops or one.touched)]
    if not seen:
        return None
    bandwidth = max((_rate(one.touched, one, latency) for one in seen if not one.flops), default=0.0)
    flops = _peaks(seen, latency, bandwidth)
    if not bandwidth:
        bandwidth = max(_rate(one.touched, one, latency) for one in seen)
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for one in seen:
        compute = one.flops / flops[one.dtype] if one.flops else 0.0
        share = max(compute, one.touched / bandwidth) / (one.seconds - latency)
        by_kind.setdefault(one.kind, []).append((share, one.seconds))
    efficiency = {kind: _weighted_median(shares) for kind, shares in by_kind.items()}
    best = max(efficiency.values())
    efficiency = {kind: share / best for kind, share in efficiency.items()}
    for name in ("matmul", "attention", "memory"):
        members = [share for kind, share in efficiency.items() if kind in by_kind and kernel_class(kind) == name]
        if members:
            efficiency[name] = median(members)
    return Fit({dtype: rate * best for dtype, rate in flops.items()}, bandwidth * best, efficiency)


def _peaks(seen: Sequence[Sample], latency: float, bandwidth: float) -> dict[str, float]:
    """The peak of each dtype, in the measure in which the memory's is ``bandwidth``."""
    products = [one for one in seen if one.flops]
    if not products:
        return {}
    reference = [one for one in products if one.kind == "aten::mm"] or products
    reached = max(_rate(one.touched, one, latency) for one in reference)
    scale = bandwidth / reached if bandwidth and reached else 1.0
    peaks: dict[str, float] = {}
    for one in [*reference, *(one for one in products if one.dtype not in {other.dtype for other in reference})]:
        peaks[one.dtype] = max(peaks.get(one.dtype, 0.0), scale * _rate(one.flops, one, latency))
    return peaks


def _rate(amount: int, sample: Sample, latency: float) -> float:
    return amount / (sample.seconds - latency)


def _weighted_median(pairs: Sequence[tuple[float, float]]) -> float:
    """The value that half of the weight lies below."""
    half, passed = sum(weight for _, weight in pairs) / 2, 0.0
    for value, weight in sorted(pairs):
        passed += weight
        if passed >= half:
            return value
    raise ValueError("no values")

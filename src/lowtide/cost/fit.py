"""Rates and efficiencies that explain measured kernels.

[Note: what can be found by measuring]
A kernel of a kind takes ``latency + max(flops / F, bytes / B) / e``, with the device's peaks F (for each dtype) and B,
and the kind's efficiency e. No measurement separates a peak from an efficiency: only their products show. So F is the
best rate of a matrix product and B that of kernels that only stream through memory, and efficiencies are relative to
them. Products bound by memory reach another share of B than of F: which, shows in the matrix product, which has kernels
bound by either, and is taken to be in the same ratio for other kinds that have FLOPs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from lowtide.cost.kernel import kernel_class

__all__ = ["Fit", "Sample", "fit"]


STREAMING = ("aten::add", "aten::clone", "aten::copy_", "aten::mul", "aten::silu")
"""Kinds that only stream through memory, each byte once."""


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
    """By kind, and by class; for kinds with FLOPs also ``kind|memory``, for kernels that memory bounds."""


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
    streaming = [one for one in seen if not one.flops]
    chosen = [one for one in streaming if one.kind in STREAMING] or streaming or seen
    bandwidth = max(_rate(one.touched, one, latency) for one in chosen)
    flops, ratio = _peaks([one for one in seen if one.flops], latency, bandwidth)
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for one in seen:
        if one.flops:
            ideal = max(one.flops / flops[one.dtype], one.touched / (bandwidth * ratio))
        else:
            ideal = one.touched / bandwidth
        by_kind.setdefault(one.kind, []).append((ideal / (one.seconds - latency), one.seconds))
    shares = {kind: _weighted_median(pairs) for kind, pairs in by_kind.items()}
    efficiency = dict(shares)
    efficiency |= {
        f"{kind}|memory": ratio * shares[kind] for kind in dict.fromkeys(one.kind for one in seen if one.flops)
    }
    for name in ("matmul", "attention", "memory"):
        if members := [share for kind, share in shares.items() if kernel_class(kind) == name]:
            efficiency[name] = median(members)
    return Fit(flops, bandwidth, efficiency)


def _peaks(products: Sequence[Sample], latency: float, bandwidth: float) -> tuple[dict[str, float], float]:
    """The peak of each dtype, and the share of the memory's that products reach where they reach their own."""
    reference = [one for one in products if one.kind == "aten::mm"] or products
    if not reference:
        return {}, 1.0
    peaks: dict[str, float] = {}
    for one in [*reference, *(one for one in products if one.dtype not in {other.dtype for other in reference})]:
        peaks[one.dtype] = max(peaks.get(one.dtype, 0.0), _rate(one.flops, one, latency))
    return peaks, max(_rate(one.touched, one, latency) for one in reference) / bandwidth


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

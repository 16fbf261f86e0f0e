"""A batch of a length that was not measured is planned as if it had been."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from lowtide.adaptive.lengths import RATIO, Lengths, bucket_of
from lowtide.trace.capture import capture
from lowtide.trace.trace import Trace, kernels_of
from tiny_models import tiny


@cache
def trace_of(tokens: int) -> Trace:
    """A model whose attention keeps a number for every pair of tokens."""
    model: Any = tiny("llama", layers=2)
    model.set_attn_implementation("eager")
    torch.manual_seed(0)
    batch = torch.randint(3, 50, (2, tokens))
    return capture(model, lambda: model(batch, labels=batch).loss, batch={"samples": 2, "tokens": 2 * tokens})


def known(*tokens: int) -> Lengths:
    lengths = Lengths()
    for one in tokens:
        lengths.add(one, trace_of(one))
    return lengths


def sizes(trace: Trace) -> list[list[tuple[int, ...]]]:
    """All that a plan counts, but times."""
    return [
        [
            *((value.size,) for value in part.values),
            *((kernel.flops, kernel.touched) for kernel in part.kernels),
            *((operator.owned, operator.net) for operator in part.operators),
        ]
        for part in (trace.before, *trace.parts, trace.after)
    ]


def test_three_lengths_determine_every_other_exactly() -> None:
    lengths = known(16, 32, 64)
    pairs = 2 * 4 * 48 * 48 * 4  # samples, heads, pairs of tokens, bytes
    assert any(value.size == pairs for value in trace_of(48).parts[0].values)
    for tokens in (8, 24, 48):
        found = lengths.trace(tokens)
        assert found is not None
        assert sizes(found) == sizes(trace_of(tokens))
        assert found.batch == {"samples": 2, "tokens": 2 * tokens}


def test_two_lengths_never_predict_too_little_in_between() -> None:
    found = known(16, 64).trace(32)
    assert found is not None
    rows = [
        (one, other)
        for both in zip(sizes(found), sizes(trace_of(32)), strict=True)
        for one, other in zip(*both, strict=True)
    ]
    assert all(one[0] >= other[0] for one, other in rows)
    assert any(one[0] > other[0] for one, other in rows)


def test_times_are_between_those_of_their_neighbours() -> None:
    lengths = known(16, 32, 64)
    found = lengths.trace(48)
    assert found is not None
    rows = zip(kernels_of(found), kernels_of(lengths.traces[32]), kernels_of(lengths.traces[64]), strict=True)
    for one, shorter, longer in rows:
        if one.seconds is None or shorter.seconds is None or longer.seconds is None:
            continue
        low, high = sorted((shorter.seconds, longer.seconds))
        assert low <= one.seconds * (1 + 1e-9)
        assert one.seconds <= high * (1 + 1e-9)


def test_nothing_is_planned_longer_than_the_longest_that_was_measured() -> None:
    lengths = known(16, 32)
    assert lengths.trace(33) is None
    assert lengths.wanted(33)
    assert lengths.bucket(31) == lengths.bucket(32) == 32 < bucket_of(32)
    assert lengths.bucket(10) == bucket_of(10)


def test_a_third_length_is_measured_where_it_differs_and_then_only_longer_ones() -> None:
    lengths = known(16, 32)
    assert not lengths.wanted(int(16 * RATIO) - 1)
    assert lengths.wanted(8)
    assert not known(8, 16, 32).wanted(4)


def test_lengths_that_do_not_do_the_same_are_planned_as_the_longest() -> None:
    lengths = known(16, 64)
    assert lengths.trace(32) != lengths.traces[64]
    lengths.traces[16] = lengths.traces[16].changed(lambda part: replace(part, kernels=part.kernels[1:]))
    assert lengths.trace(32) == lengths.traces[64]

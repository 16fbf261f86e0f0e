"""A batch of a length that was not measured is planned as if it had been."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from lowtide.adaptive.lengths import Lengths, bucket_of
from lowtide.trace.capture import capture
from lowtide.trace.trace import Part, Trace
from support.tiny_models import tiny


@cache
def trace_of(tokens: int, samples: int = 2) -> Trace:
    """A model whose attention keeps a number for every pair of tokens."""
    model: Any = tiny("llama", layers=2)
    model.set_attn_implementation("eager")
    torch.manual_seed(0)
    batch = torch.randint(3, 50, (samples, tokens))
    return capture(
        model, lambda: model(batch, labels=batch).loss, batch={"samples": samples, "tokens": samples * tokens}
    )


def known(*tokens: int) -> Lengths:
    lengths = Lengths()
    for one in tokens:
        lengths.add((2, one), trace_of(one))
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


def saved(trace: Trace) -> list[int]:
    return [numbers[0] for part in sizes(trace) for numbers in part]


def test_three_lengths_determine_every_other_exactly_also_longer_ones() -> None:
    lengths = known(16, 32, 64)
    pairs = 2 * 4 * 48 * 48 * 4  # samples, heads, pairs of tokens, bytes
    assert any(value.size == pairs for value in trace_of(48).parts[0].values)
    for tokens in (8, 24, 48, 80, 128):
        found = lengths.trace((2, tokens))
        assert found is not None
        assert sizes(found) == sizes(trace_of(tokens))
        assert found.batch == {"samples": 2, "tokens": 2 * tokens}


def test_three_shapes_determine_batches_of_other_numbers_of_samples_too() -> None:
    lengths = Lengths()
    for samples, tokens in ((2, 16), (3, 32), (4, 24)):
        lengths.add((samples, tokens), trace_of(tokens, samples))
    found = lengths.trace((6, 48))
    assert found is not None
    wanted = saved(trace_of(48, 6))
    assert len(saved(found)) == len(wanted)
    # What grows with the tokens or the samples alone, such as a mask of one sample's tokens, is not followed.
    assert sum(map(abs, map(int.__sub__, saved(found), wanted))) < 0.02 * sum(wanted)


def test_two_lengths_never_predict_too_little() -> None:
    lengths = known(16, 64)
    for tokens in (32, 128):
        found = lengths.trace((2, tokens))
        assert found is not None
        rows = list(zip(saved(found), saved(trace_of(tokens)), strict=True))
        assert all(one >= other for one, other in rows)
        assert any(one > other for one, other in rows)


def test_one_length_tells_of_no_other() -> None:
    lengths = known(32)
    assert not lengths.vary
    assert lengths.tell((2, 32))
    assert lengths.tell((2, 36))
    assert not lengths.tell((2, 64))
    assert not lengths.tell((2, 16))
    assert lengths.bucket((2, 64)) == lengths.bucket((2, 8)) == (2, 32)


def test_numbers_of_samples_of_one_length_do_not_tell_of_longer_ones() -> None:
    lengths = Lengths()
    for samples in (2, 3, 4):
        lengths.add((samples, 16), trace_of(16))
    assert lengths.tell((9, 16))
    assert not lengths.tell((4, 64))
    assert lengths.trace((4, 64)) is None
    assert lengths.trace((3, 8)) is lengths.traces[3, 16]  # which takes more


def test_times_follow_the_work() -> None:
    lengths = known(16, 32, 64)
    per_work = 1e-6

    def timed(part: Part) -> Part:
        return replace(
            part,
            kernels=tuple(one._replace(seconds=1e-3 + per_work * (one.flops or one.touched)) for one in part.kernels),
        )

    for shape, trace in lengths.traces.items():
        lengths.traces[shape] = trace.changed(timed)
    for tokens in (24, 48, 128):
        found = lengths.trace((2, tokens))
        assert found is not None
        for one in (kernel for part in (found.before, *found.parts, found.after) for kernel in part.kernels):
            assert one.seconds == pytest.approx(1e-3 + per_work * (one.flops or one.touched))


def test_a_time_that_falls_with_more_work_is_noise() -> None:
    lengths = known(16, 64)
    slower = lengths.traces[2, 16].changed(
        lambda part: replace(part, kernels=tuple(one._replace(seconds=2.0) for one in part.kernels))
    )
    faster = lengths.traces[2, 64].changed(
        lambda part: replace(part, kernels=tuple(one._replace(seconds=1.0) for one in part.kernels))
    )
    lengths.traces = {(2, 16): slower, (2, 64): faster}
    found = lengths.trace((2, 256))
    assert found is not None
    assert {one.seconds for part in found.parts for one in part.kernels} <= {1.0, 2.0}


def test_a_bucket_is_no_longer_than_the_longest_that_was_measured() -> None:
    lengths = known(16, 32)
    assert lengths.bucket((2, 31)) == lengths.bucket((2, 32)) == (2, 32)
    assert bucket_of(32) > 32
    assert lengths.bucket((2, 10)) == (2, bucket_of(10))
    assert lengths.bucket((2, 33)) == (2, bucket_of(33))


def test_every_batch_between_the_measured_ones_has_a_bucket_that_is_planned_ahead() -> None:
    lengths = known(16, 32, 64)
    ahead = list(lengths.between())
    assert {lengths.bucket((2, tokens)) for tokens in range(16, 65)} <= set(ahead)
    assert ahead == sorted(set(ahead))
    assert ahead[-1][1] > 64


def test_lengths_that_do_not_do_the_same_are_planned_as_a_longer_one() -> None:
    lengths = known(16, 64)
    assert lengths.trace((2, 32)) != lengths.traces[2, 64]
    lengths.traces[2, 16] = lengths.traces[2, 16].changed(lambda part: replace(part, kernels=part.kernels[1:]))
    assert lengths.trace((2, 32)) == lengths.traces[2, 64]
    assert lengths.trace((2, 128)) is None

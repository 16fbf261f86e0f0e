"""FSDP's streams are in the Trace of an imagined rank: what it gathers ahead, and where it waits."""

from __future__ import annotations

from lowtide.models.shape import DecoderShape
from lowtide.trace.trace import Trace
from lowtide.train.run import Degrees
from lowtide.train.traced import TracedRank, trace_rank

SHAPE = DecoderShape(
    vocab_size=128, hidden_size=32, num_layers=4, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
    intermediate_size=64,
)  # fmt: skip


def traced(degrees: Degrees) -> Trace:
    return trace_rank(TracedRank(shape=SHAPE, degrees=degrees, sequence=32))


def test_fsdp_gathers_and_reduces_on_streams_that_the_computation_waits_for() -> None:
    trace = traced(Degrees(shard=2))
    for part in trace.parts:
        collectives = [kernel for kernel in part.kernels if kernel.ranks]
        assert collectives
        assert all(kernel.stream for kernel in collectives)
        assert any(sync.stream == 0 and sync.waits for sync in part.syncs)


def test_tensor_parallel_waits_at_once_on_the_stream_that_computes() -> None:
    trace = traced(Degrees(tensor=2))
    collectives = [kernel for part in trace.parts for kernel in part.kernels if kernel.ranks]
    assert collectives
    assert all(kernel.stream == 0 for kernel in collectives)


def test_a_trace_with_streams_survives_its_file() -> None:
    trace = traced(Degrees(shard=2))
    assert Trace.from_json(trace.as_json()) == trace


def test_one_device_has_one_stream() -> None:
    assert not any(part.syncs for part in traced(Degrees()).parts)

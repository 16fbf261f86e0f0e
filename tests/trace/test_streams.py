"""FSDP's streams are in the Trace of an imagined rank: what it gathers ahead, and where it waits."""

from __future__ import annotations

import torch

from lowtide._torch_private.streams import watch_cpu_streams
from lowtide.models.shape import DecoderShape
from lowtide.trace.streams import Streams
from lowtide.trace.trace import Sync, Trace
from lowtide.train.run import Degrees
from lowtide.train.traced import TracedRank, trace_rank

SHAPE = DecoderShape(
    vocab_size=128, hidden_size=32, num_layers=4, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
    intermediate_size=64,
)  # fmt: skip


def traced(degrees: Degrees) -> Trace:
    return trace_rank(TracedRank(shape=SHAPE, degrees=degrees, sequence=32))


def test_waits_of_streams_are_reported_and_the_classes_left_as_they_were() -> None:
    found: list[Sync] = []
    before = vars(torch.cpu.Stream).copy(), vars(torch.cpu.Event).copy()
    streams = Streams(found.append)
    other = torch.cpu.Stream()
    with watch_cpu_streams(streams):
        event = other.record_event()
        torch.cpu.current_stream().wait_event(event)
        other.wait_stream(torch.cpu.current_stream())
        with torch.cpu.stream(other):
            assert streams.current == 1
    assert (vars(torch.cpu.Stream), vars(torch.cpu.Event)) == before
    recorded, waited, joined = found
    assert (recorded.stream, recorded.waits) == (1, False)
    assert waited == Sync(0, recorded.channel)
    assert joined == Sync(1, other=0)


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

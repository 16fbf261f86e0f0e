"""Which ranks a group has, and which of them are on one node."""

from __future__ import annotations

import pytest

from lowtide.errors import TraceError
from lowtide.models.shape import DecoderShape
from lowtide.trace.layout import Layout, stride_of
from lowtide.trace.trace import Trace, kernels_of
from lowtide.train.run import Degrees
from lowtide.train.traced import TracedRank, trace_rank


def test_a_layout_comes_back_from_json() -> None:
    layout = Layout(replicate=2, shard=4, tensor=8, expert=2, pipeline=3)
    assert Layout.from_json(layout.as_json()) == layout
    assert layout.world == 192
    assert Layout.from_json({}) is None
    with pytest.raises(TraceError, match="found also tp"):
        Layout.from_json({"tp": 2})


def test_stages_that_fill_a_node_are_on_different_nodes() -> None:
    assert not any(Layout().crosses_nodes(stage, stage + 1, 8) for stage in range(7))
    assert Layout().crosses_nodes(7, 8, 8)
    assert Layout(tensor=8).crosses_nodes(0, 1, 8)
    assert not Layout(tensor=8).crosses_nodes(1, 1, 8)
    assert Layout(shard=3).crosses_nodes(1, 2, 8)  # ranks 3, 4, 5 and 6, 7, 8


def test_a_group_has_one_distance() -> None:
    assert stride_of([4, 5, 6, 7]) == 1
    assert stride_of([1, 9, 17]) == 8
    assert stride_of([0, 1, 8, 9]) == 3


SHAPE = DecoderShape(
    vocab_size=64, hidden_size=32, num_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=8,
    intermediate_size=64, max_position_embeddings=32,
)  # fmt: skip


def test_a_traced_rank_knows_how_far_apart_its_groups_are() -> None:
    """Tensor parallel is innermost: the ranks that share parameters are as far apart as it is wide."""
    trace = trace_rank(TracedRank(shape=SHAPE, degrees=Degrees(tensor=4, shard=8), sequence=16))
    found = {(kernel.ranks, kernel.stride) for kernel in kernels_of(trace) if kernel.ranks > 1}
    assert found == {(4, 1), (8, 4)}
    assert trace.layout == Layout(tensor=4, shard=8)
    assert Trace.from_json(trace.as_json()) == trace

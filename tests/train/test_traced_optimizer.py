"""The optimizer of an imagined rank is traced whatever its parameters are sharded over."""

from __future__ import annotations

import pytest

from lowtide.models.shape import DecoderShape
from lowtide.train.run import Degrees
from lowtide.train.traced import TracedRank, trace_rank
from models.shapes import LENGTH, deepseek, llama


@pytest.mark.parametrize(
    ("shape", "degrees"),
    [
        (llama(num_layers=2, qk_norm=True), Degrees(tensor=2)),
        (deepseek(num_layers=2), Degrees(shard=2, expert=2)),
        (deepseek(num_layers=2), Degrees(shard=2)),
    ],
    ids=["norms of heads under tensor parallel", "experts on a mesh of their own", "one mesh"],
)
def test_parameters_on_different_meshes_are_updated_by_kernels_of_their_own(
    shape: DecoderShape, degrees: Degrees
) -> None:
    trace = trace_rank(TracedRank(shape=shape, degrees=degrees, samples=2, sequence=LENGTH))
    kinds = [kernel.kind for kernel in trace.optimizer.kernels]
    assert "aten::_fused_adamw_" in kinds

"""A rank that shares experts is traced as if every expert got the same number of tokens."""

from __future__ import annotations

import pytest

from lowtide.models.experts_shape import ExpertsShape
from lowtide.models.shape import DecoderShape
from lowtide.train.run import Degrees
from lowtide.train.traced import TracedRank, trace_rank

TOKENS, WIDTH, CHOSEN = 64, 32, 2


@pytest.mark.parametrize("skew", [1.0, 1.5])
def test_the_tokens_of_all_ranks_are_exchanged_in_equal_parts(skew: float) -> None:
    shape = DecoderShape(
        vocab_size=128,
        hidden_size=WIDTH,
        num_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        experts=ExpertsShape(count=8, chosen=CHOSEN, intermediate_size=16),
    )
    trace = trace_rank(TracedRank(shape=shape, degrees=Degrees(shard=4, expert=4), sequence=TOKENS, expert_skew=skew))
    part = trace.parts[0]
    arriving = [value for value in part.values if value.owner.endswith("exchange")]
    # Each of a token's slots is a row that goes to one rank, and as many are returned; more may come than are sent.
    sent = TOKENS * CHOSEN * WIDTH * 2
    assert {value.size for value in arriving} == {sent, round(sent * skew)}

"""What is predicted for a rank that is not started is what two real processes need."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide.models.experts_shape import ExpertsShape
from lowtide.models.shape import DecoderShape
from lowtide.planner.pipeline import even_pipeline
from lowtide.policy import LayerPolicy, Pattern, Policy, Recompute, Rule, Swap
from lowtide.train.run import Degrees, Precision
from lowtide.train.traced import TracedRank
from support import predicted_ranks
from support.ranks import Ranks

BOUND = 0.02
LAYERS, WIDTH, HEADS = 4, 128, 4
SINGLE = Precision(parameters="float32", compute="float32")
MIXED = Precision(parameters="float32", compute="bfloat16")
SHARED, STAGES, TENSOR = Degrees(shard=2), Degrees(pipeline=2), Degrees(tensor=2, sequence_parallel=True)

OPERATORS = LayerPolicy(
    rules=(
        Rule(Pattern(r"feed_forward\.w1\.activation\.silu"), Recompute()),
        Rule(Pattern(r"feed_forward\.mul"), Recompute()),
        Rule(Pattern(r"attention\.flash_attention"), Swap(1)),
    )
)
POLICIES = {
    "everything kept": Policy((LayerPolicy(),) * LAYERS),
    "every layer recomputed": Policy((LayerPolicy(default=Recompute()),) * LAYERS),
    "some operators recomputed, attention swapped": Policy((OPERATORS,) * LAYERS),
}


def llama(experts: ExpertsShape | None = None) -> DecoderShape:
    return DecoderShape(
        vocab_size=1000, hidden_size=WIDTH, num_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2, head_dim=WIDTH // HEADS, intermediate_size=2 * WIDTH,
        max_position_embeddings=128, experts=experts,
    )  # fmt: skip


def mixture() -> DecoderShape:
    return llama(
        ExpertsShape(
            count=8, chosen=2, intermediate_size=WIDTH // 2, shared=1, first_dense=1, scoring="sigmoid", groups=4,
            chosen_groups=2, normalised=True, scaling=1.5, auxiliary=0.01, balancing="seq_aux_loss", bias=True,
            bias_rate=0.01,
        )
    )  # fmt: skip


def rank_of(shape: DecoderShape, degrees: Degrees, precision: Precision) -> TracedRank:
    return TracedRank(shape=shape, degrees=degrees, precision=precision, samples=4, sequence=128)


CASES = {
    "fsdp2 in float32": rank_of(llama(), SHARED, SINGLE),
    "fsdp2 in bfloat16": rank_of(llama(), SHARED, MIXED),
    "pp2 in float32": rank_of(llama(), STAGES, SINGLE),
    "pp2 in bfloat16": rank_of(llama(), STAGES, MIXED),
    "zero bubble in bfloat16": rank_of(llama(), STAGES, MIXED),
    "cp2 in float32": rank_of(llama(), Degrees(context=2), SINGLE),
    "cp2 in bfloat16": rank_of(llama(), Degrees(context=2), MIXED),
    "tp2 in bfloat16": rank_of(llama(), TENSOR, MIXED),
    "tp2 in bfloat16, chunked": rank_of(replace(llama(), head_loss="chunked"), TENSOR, MIXED),
    "experts, tp2 in bfloat16": rank_of(mixture(), TENSOR, MIXED),
    "experts, fsdp2 in bfloat16": rank_of(mixture(), SHARED, MIXED),
    "experts, pp2 in bfloat16": rank_of(mixture(), STAGES, MIXED),
}
PIPELINES = {"zero bubble in bfloat16": even_pipeline(LAYERS, 2, 2, micro_batches=4, schedule="zero_bubble_v")}
"""Where it is not 1F1B."""
QUICK = ("fsdp2 in bfloat16", "pp2 in bfloat16")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CASES]
)
def test_every_ranks_peak_is_predicted(name: str, ranks: Ranks) -> None:
    case, policies = CASES[name], list(POLICIES.values())
    pipeline = PIPELINES.get(name)
    predicted = predicted_ranks.predicted_peaks(case, policies, pipeline)
    measured = ranks.run(predicted_ranks.measured_peaks, case, policies, pipeline)
    errors = {}
    for place, label in enumerate(POLICIES):
        for rank, peaks in enumerate(measured):
            expected = predicted[place][rank % len(predicted[place])]  # without stages all ranks do the same
            errors[label, rank] = expected / peaks[place] - 1
            print(f"{name}, {label}, rank {rank}: {expected} predicted, {errors[label, rank]:+.2%}")
    assert max(map(abs, errors.values())) <= BOUND

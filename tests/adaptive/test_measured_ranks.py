"""Ranks that share parameters, and stages of a pipeline, are measured while they train: peaks follow from it."""

from __future__ import annotations

import json

import pytest
import torch

from lowtide.adaptive.merge import joined, slowest
from lowtide.cost.devices import find_device
from lowtide.models.shape import DecoderShape
from lowtide.planner.simulate import simulate
from lowtide.policy import LayerPolicy, Pattern, Policy, Recompute, Rule, Swap
from lowtide.trace.trace import Trace
from lowtide.train.run import Degrees, Precision
from lowtide.train.traced import TracedRank
from support import measured_ranks, predicted_ranks
from support.ranks import Ranks

LAYERS, WIDTH, HEADS = 4, 128, 4
SHAPE = DecoderShape(
    vocab_size=1000, hidden_size=WIDTH, num_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS // 2,
    head_dim=WIDTH // HEADS, intermediate_size=2 * WIDTH, max_position_embeddings=128,
)  # fmt: skip
SINGLE = Precision(parameters="float32", compute="float32")
MIXED = Precision(parameters="float32", compute="bfloat16")
OPERATORS = LayerPolicy(
    rules=(
        Rule(Pattern(r"feed_forward\.mul"), Recompute()),
        Rule(Pattern(r"attention\.flash_attention"), Swap(1)),
    )
)
POLICIES = [
    Policy((LayerPolicy(),) * LAYERS),
    Policy((LayerPolicy(default=Recompute()),) * LAYERS),
    Policy((OPERATORS,) * LAYERS),
]


@pytest.mark.parametrize(
    ("degrees", "precision"),
    [
        pytest.param(Degrees(shard=2), SINGLE, marks=pytest.mark.slow),
        (Degrees(pipeline=2), SINGLE),
        pytest.param(Degrees(shard=2), MIXED, marks=pytest.mark.slow),
        pytest.param(Degrees(pipeline=2), MIXED, marks=pytest.mark.slow),
        pytest.param(Degrees(tensor=2), SINGLE, marks=pytest.mark.slow),
        pytest.param(Degrees(pipeline=2, shard=2), SINGLE, marks=pytest.mark.slow),
    ],
    ids=["fsdp2", "pp2", "fsdp2 in bfloat16", "pp2 in bfloat16", "tp2", "pp2 x fsdp2"],
)
def test_what_ranks_show_predicts_their_peaks(
    degrees: Degrees, precision: Precision, ranks: Ranks, four_ranks: Ranks
) -> None:
    stages, of_stage = degrees.pipeline, degrees.world // degrees.pipeline
    if degrees.world == 4:
        ranks = four_ranks
    # Stages that share parameters are predicted less exactly, and since torch 2.15 the first stage too high, by the
    # outputs of two micro-batches; why is not known.
    close = 5e-2 if stages > 1 and (of_stage > 1 or torch.__version__ >= "2.15") else 1e-2
    if stages > 1 and precision is MIXED:
        close = max(close, 1.5e-2)  # the first stage is predicted too low by one output of a micro-batch
    case = TracedRank(shape=SHAPE, degrees=degrees, precision=precision, samples=4, sequence=128)
    found = ranks.run(measured_ranks.measured_trace, case)
    assert all(one.same for one in found)
    traces = [Trace.from_json(json.loads(one.trace)) for one in found]
    whole = joined([slowest(traces[first : first + of_stage]) for first in range(0, degrees.world, of_stage)])
    assert len(whole.layers) == LAYERS
    assert whole.notes == ()
    pipeline = predicted_ranks.pipeline_of(case)
    measured = ranks.run(predicted_ranks.measured_peaks, case, POLICIES)
    for place, policy in enumerate(POLICIES):
        simulated = simulate(whole, policy, find_device("h100"), pipeline).stages
        for rank, peaks in enumerate(measured):
            predicted = simulated[rank // of_stage].peak
            assert predicted == pytest.approx(peaks[place], rel=close), (policy, rank)

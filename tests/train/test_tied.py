"""Weights that the embedding and the head share, in every layout: one copy, or two that stay equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.models.shape import DecoderShape
from lowtide.train.run import Degrees
from lowtide.train.traced import TracedRank, trace_rank
from support.commands import TINY, merged, train
from support.layout_cases import SHARD, TENSOR, close, data, pipeline
from support.ranks import Ranks
from train import runs

TIED = {"model.model_config.tie_word_embeddings": True}
SEQUENCE = {"parallel_config.use_seq_parallel": True}
CHUNKED = {"model.model_config.head_loss": "chunked"}
ALONE = {**data(1, 4), **TIED}


@pytest.mark.parametrize(
    "settings",
    [
        {**data(1, 4), **TENSOR},
        {**data(1, 4), **TENSOR, **SEQUENCE, **CHUNKED},
        pipeline(),
        pytest.param({**pipeline(), "model.model_config.pp_interleave_num": 2}, marks=pytest.mark.slow),
        pytest.param({**pipeline(), "runner_wrapper.scale_sense": 1024.0}, marks=pytest.mark.slow),
    ],
    ids=["tp2", "tp2 + sequence chunked", "pp2", "pp2 interleaved", "pp2 scaled"],
)
def test_two_ranks_train_what_one_process_trains(settings: dict[str, Any], one: Ranks, ranks: Ranks) -> None:
    expected = one.run(runs.train, "llama", ALONE)[0]
    for found in ranks.run(runs.train, "llama", {**settings, **TIED}):
        close(found, expected)


@pytest.mark.parametrize(
    "settings",
    [
        {**pipeline(), **TENSOR},
        pytest.param({**pipeline(2), **SHARD}, marks=pytest.mark.slow),
        pytest.param(pipeline(2), marks=pytest.mark.slow),
        pytest.param({**data(2, 2), **SHARD, **TENSOR}, marks=pytest.mark.slow),
    ],
    ids=["pp2 x tp2", "pp2 x fsdp2", "pp2 x dp2", "tp2 x fsdp2"],
)
def test_four_ranks_train_what_one_process_trains(settings: dict[str, Any], one: Ranks, four_ranks: Ranks) -> None:
    expected = one.run(runs.train, "llama", ALONE)[0]
    for found in four_ranks.run(runs.train, "llama", {**settings, **TIED}):
        close(found, expected)


def test_both_copies_are_equal_after_some_steps(ranks: Ranks) -> None:
    first, last = ranks.run(runs.parameter_after, "llama", {**pipeline(), **TIED}, "embedding.weight")
    assert torch.equal(first, last)
    begun, _ = ranks.run(runs.parameter_after, "llama", {**pipeline(), **TIED}, "embedding.weight", 0)
    assert not torch.equal(first, begun)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saving", "reading"),
    [(pipeline(), {**data(1, 4), **TENSOR}), ({**data(1, 4), **TENSOR}, pipeline())],
    ids=["pp2 to tp2", "tp2 to pp2"],
)
def test_a_checkpoint_is_read_in_other_layouts(
    saving: dict[str, Any], reading: dict[str, Any], one: Ranks, ranks: Ranks, tmp_path: Path
) -> None:
    expected = one.run(runs.train, "llama", ALONE, 4)[0][2:]
    ranks.run(runs.saved, "llama", {**saving, **TIED}, tmp_path)
    for found in ranks.run(runs.resumed, "llama", {**reading, **TIED}, tmp_path):
        close(found, expected)
    close(one.run(runs.resumed, "llama", ALONE, tmp_path)[0], expected)


def test_a_trace_of_a_stage_has_a_copy_of_its_own() -> None:
    shape = DecoderShape(
        vocab_size=1024, hidden_size=32, num_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        intermediate_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    weights = 1024 * 32 * 4
    one = trace_rank(TracedRank(shape=shape, sequence=16))
    assert sum(one.before.static.parameters + one.after.static.parameters) < 1.5 * weights
    staged = trace_rank(TracedRank(shape=shape, degrees=Degrees(pipeline=2), sequence=16))
    assert all(sum(part.static.parameters) >= weights for part in (staged.before, staged.after))


def test_a_folded_pipeline_is_refused(tmp_path: Path) -> None:
    folded = {
        "model": {"model_config": {"tie_word_embeddings": True, "num_layers": 4, "pp_interleave_num": 2}},
        "parallel_config": {"pipeline_stage": 2, "micro_batch_num": 4},
        "parallel": {"pipeline_config": {"pipeline_scheduler": "zero_bubble_v"}},
    }
    done = train(tmp_path, merged(TINY, folded), "--dry-run")
    assert done.returncode == 1
    assert "two parts of one rank" in done.stderr

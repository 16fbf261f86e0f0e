"""What a rank holds of the logits changes the peak of a step, and not what is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lowtide.cost.devices import find_device
from lowtide.cost.imagined import device_kernels
from lowtide.models.shape import DecoderShape, HeadLoss
from lowtide.planner.simulate import simulate
from lowtide.policy import LayerPolicy, Policy
from lowtide.train.run import Degrees
from lowtide.train.traced import TracedRank, trace_rank
from support.commands import TINY, log, merged, train
from support.layout_cases import MODELS, SHARD, TENSOR, close, data, pipeline
from support.ranks import Ranks
from train import runs

KEY = "model.model_config.head_loss"
CHUNKED, WHOLE = {KEY: "chunked"}, {KEY: "whole"}
SEQUENCE = {"parallel_config.use_seq_parallel": True}
TOKENS = {"runner_wrapper.calculate_per_token_loss": True}
PREDICTED = {"model.model_config.num_nextn_predict_layers": 1}


@pytest.mark.parametrize(
    "settings",
    [
        {**data(1, 4), **TENSOR, **WHOLE},
        {**data(1, 4), **TENSOR, **CHUNKED},
        {**data(1, 4), **TENSOR, **SEQUENCE, **CHUNKED, **TOKENS},
        pytest.param({**data(2, 2), **SHARD, **CHUNKED}, marks=pytest.mark.slow),
        {**pipeline(), **CHUNKED},
        pytest.param({**pipeline(), **CHUNKED, "model.model_config.pp_interleave_num": 2}, marks=pytest.mark.slow),
    ],
    ids=["tp2 whole", "tp2 chunked", "tp2 + sequence chunked", "fsdp2 chunked", "pp2 chunked", "pp2 x 2 chunked"],
)
def test_two_ranks_train_what_one_process_trains(settings: dict[str, Any], one: Ranks, ranks: Ranks) -> None:
    expected = one.run(runs.train, "llama", data(1, 4))[0]
    for found in ranks.run(runs.train, "llama", settings):
        close(found, expected)


@pytest.mark.parametrize("loss", [pytest.param({}, marks=pytest.mark.slow), CHUNKED], ids=["sharded", "chunked"])
def test_the_last_stage_has_the_sharded_head(loss: dict[str, Any], one: Ranks, four_ranks: Ranks) -> None:
    expected = one.run(runs.train, "llama", data(1, 4))[0]
    for found in four_ranks.run(runs.train, "llama", {**pipeline(), **TENSOR, **SEQUENCE, **loss}):
        close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [{}, CHUNKED], ids=["sharded", "chunked"])
def test_multi_token_prediction_uses_the_same_loss(loss: dict[str, Any], one: Ranks, ranks: Ranks) -> None:
    expected = one.run(runs.train, "deepseek", {**data(1, 4), **PREDICTED})[0]
    for found in ranks.run(runs.train, "deepseek", {**data(1, 4), **TENSOR, **PREDICTED, **loss}):
        close(found, expected)


def test_without_tensor_parallel_the_default_is_the_whole_vocabulary_bit_by_bit(one: Ranks) -> None:
    found = [one.run(runs.records_of, MODELS["llama"], {**data(1, 4), **more}, 2)[0] for more in ({}, WHOLE)]
    assert [step.loss for step in found[0]] == [step.loss for step in found[1]]


def test_a_plan_knows_the_smaller_peak() -> None:
    peaks = {loss: predicted_peak(loss) for loss in ("whole", "sharded", "chunked")}
    # Of 16384 tokens and a vocabulary of 32768 all logits are 1 GiB in bfloat16 and 2 GiB in float32.
    assert peaks["sharded"] < 0.6 * peaks["whole"]
    assert peaks["chunked"] < 0.75 * peaks["sharded"]


def predicted_peak(loss: HeadLoss) -> int:
    shape = DecoderShape(
        vocab_size=1 << 15, hidden_size=64, num_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=16,
        intermediate_size=128, max_position_embeddings=16384, head_loss=loss,
    )  # fmt: skip
    with device_kernels("other"):
        trace = trace_rank(TracedRank(shape=shape, degrees=Degrees(tensor=2), sequence=16384))
    return simulate(trace, Policy((LayerPolicy(),) * 2), find_device("h100")).stages[0].peak


def test_the_command_takes_the_key_and_refuses_another_value(tmp_path: Path) -> None:
    chosen = {"model": {"model_config": {"head_loss": "chunked"}}}
    done = train(tmp_path, merged(TINY, chosen))
    assert done.returncode == 0, done.stderr
    assert "loss:" in log(tmp_path)
    wrong = train(tmp_path, merged(TINY, {"model": {"model_config": {"head_loss": "parts"}}}), "--dry-run")
    assert wrong.returncode == 1
    assert "head_loss" in wrong.stderr

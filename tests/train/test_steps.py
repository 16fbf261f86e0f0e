"""What becomes of a step: loss scale, skipping, precision, drop rates, other models and the newer layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.train.record import StepRecord
from support.layout_cases import MODELS, TENSOR, data, pipeline
from support.ranks import Ranks
from train import runs

NEWER = """
training: {steps: 4, local_batch_size: 2, global_batch_size: 8, max_norm: 1.0, seed: 7}
parallelism: {}
lr_scheduler: {type: ConstantWarmUpLR, learning_rate: 1.0e-3}
model:
  vocab_size: 128
  hidden_size: 32
  num_hidden_layers: 4
  num_attention_heads: 4
  intermediate_size: 64
  seq_length: 32
train_dataset: {dataloader: {type: SyntheticDataLoader, sizes: [64, 0, 0]}}
recompute: {mode: full, full_recompute_layer: ["0-1"]}
"""
EXPERTS = """
moe_config:
  expert_num: 4
  num_experts_chosen: 2
  moe_intermediate_size: 32
  capacity_factor: 0.5
  callback_moe_droprate: true
callback:
  - {type: MoEDropRateCallback, expert_num: 4, capacity_factor: 0.5, num_layers: 4, mtp_depth: 0}
"""


def steps(ranks: Ranks, text: str, settings: dict[str, Any], count: int = 3) -> list[StepRecord]:
    found = ranks.run(runs.records_of, text, settings, count)
    assert all([(a.loss, a.global_norm) for a in one] == [(b.loss, b.global_norm) for b in found[0]] for one in found)
    records: list[StepRecord] = found[0]
    return records


def test_an_overflow_skips_the_step_and_halves_the_scale(one: Ranks) -> None:
    scale = {
        "model.model_config.compute_dtype": "float16",
        "runner_wrapper.scale_sense": {
            "type": "DynamicLossScaleUpdateCell",
            "loss_scale_value": 2.0**34,  # gradients times this are beyond float16
            "scale_factor": 4.0,
            "scale_window": 2,
        },
    }
    records = steps(one, MODELS["llama"], {**data(1, 1), **scale}, 12)
    assert [record.overflow for record in records[:2]] == [True, True]
    assert records[1].loss_scale == 2.0**32
    assert [record.skipped for record in records] == [record.overflow for record in records]
    trained = [record for record in records if not record.overflow]
    assert trained, records
    assert records[0].loss == pytest.approx(4.85, abs=0.2)


def test_a_spike_of_the_norm_skips_the_step(one: Ranks) -> None:
    skip = {"runner_wrapper.use_skip_data_by_global_norm": True, "runner_wrapper.global_norm_spike_threshold": 0.0001}
    records = steps(one, MODELS["llama"], {**data(1, 1), **skip})
    assert all(record.skipped and not record.overflow for record in records)


def test_bfloat16_products_train_near_single_precision(one: Ranks, ranks: Ranks) -> None:
    expected = steps(one, MODELS["llama"], data(1, 1))
    half = {"model.model_config.compute_dtype": "bfloat16"}
    for settings, group in (
        ({**data(1, 1), **half}, one),
        ({**data(2, 1), **half, "parallel.enable_parallel_optimizer": True}, ranks),
    ):
        found = steps(group, MODELS["llama"], settings)
        assert [record.loss for record in found] == pytest.approx([record.loss for record in expected], rel=1e-2)
        assert [record.loss for record in found] != [record.loss for record in expected]


def test_experts_tell_what_they_drop(ranks: Ranks) -> None:
    records = steps(ranks, MODELS["llama"] + EXPERTS, data(2, 2))
    for record in records:
        assert set(record.drop_rates) == {0, 1, 2, 3}
        assert all(0.5 <= rate < 1 for rate in record.drop_rates.values())  # room for half of the slots at most
        assert record.losses["auxiliary"] > 0
        assert record.loss == pytest.approx(record.losses["lm"] + record.losses["auxiliary"])


def test_prediction_layers_add_their_loss_in_every_layout(one: Ranks, ranks: Ranks) -> None:
    deeper = {"model.model_config.num_nextn_predict_layers": 1, "model.model_config.mtp_loss_factor": 0.3}
    alone = steps(one, MODELS["deepseek"], {**data(1, 4), **deeper})
    shared = steps(ranks, MODELS["deepseek"], {**data(2, 2), **deeper, "parallel.enable_parallel_optimizer": True})
    assert all(record.losses["mtp"] == pytest.approx(0.3 * record.losses["lm"], rel=0.1) for record in alone)
    assert [record.loss for record in shared] == pytest.approx([record.loss for record in alone], rel=1e-6)


@pytest.mark.parametrize(
    "layout",
    [
        {**data(1, 4), **TENSOR},
        {**data(2, 2), "parallel_config.expert_parallel": 2},
        pipeline(),
        pytest.param(
            {**pipeline(), "model.model_config.pp_interleave_num": 2, "model.model_config.head_loss": "chunked"},
            marks=pytest.mark.slow,
        ),
        pytest.param({**pipeline(), "model.model_config.tie_word_embeddings": True}, marks=pytest.mark.slow),
    ],
    ids=["tp2", "ep2", "pp2", "pp2 interleaved chunked", "pp2 tied"],
)
def test_prediction_layers_train_alike_in_layouts(layout: dict[str, Any], one: Ranks, ranks: Ranks) -> None:
    deeper = {"model.model_config.num_nextn_predict_layers": 1}
    tied = {key: value for key, value in layout.items() if "tie_word" in key}
    alone = steps(one, MODELS["deepseek"], {**data(1, 4), **deeper, **tied})
    shared = steps(ranks, MODELS["deepseek"], {**layout, **deeper})
    assert all(record.losses["mtp"] > 0 for record in shared)
    for found, expected in zip(shared, alone, strict=True):
        assert found.loss == pytest.approx(expected.loss, rel=1e-6)
        assert found.global_norm == pytest.approx(expected.global_norm, rel=1e-5)


def test_both_embeddings_of_a_pipeline_that_predicts_stay_equal(ranks: Ranks) -> None:
    deeper = {**pipeline(), "model.model_config.num_nextn_predict_layers": 1}
    first, last = ranks.run(runs.parameter_after, "deepseek", deeper, "embedding.weight")
    assert torch.equal(first, last)


def test_decisions_for_prediction_layers_change_no_bit(one: Ranks) -> None:
    deeper = {**data(1, 4), "model.model_config.num_nextn_predict_layers": 2}
    plain = [(record.loss, record.global_norm) for record in steps(one, MODELS["deepseek"], deeper)]
    for recompute in ({"recompute": True}, {"select_recompute": {"mlp\\.experts\\.mul": True, "mlp\\.mul": True}}):
        decided = steps(one, MODELS["deepseek"], {**deeper, "recompute_config": recompute})
        assert [(record.loss, record.global_norm) for record in decided] == plain


def test_the_newer_layout_trains_the_same_model(one: Ranks, ranks: Ranks) -> None:
    alone, shared = steps(one, NEWER, {}), steps(ranks, NEWER, {})
    assert [record.loss for record in shared] == pytest.approx([record.loss for record in alone], rel=1e-6)
    assert [record.samples for record in alone] == [8, 16, 24]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of transformers, with weights."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5,
    )  # fmt: skip
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("hugging_face")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def test_a_model_of_transformers_is_trained_by_its_directory(directory: Path, one: Ranks, ranks: Ranks) -> None:
    text = MODELS["llama"] + "recompute_config: {select_recompute: true}\n"
    model = {"pretrained_model_dir": str(directory), "model.model_config.num_layers": 2}
    alone = steps(one, text, {**data(1, 1), **model})
    shared = steps(ranks, text, {**data(2, 1), **model, "parallel.enable_parallel_optimizer": True})
    assert [record.loss for record in shared] == pytest.approx([record.loss for record in alone], rel=1e-6)


def test_our_llama_with_the_weights_of_transformers_is_theirs(directory: Path, one: Ranks) -> None:
    """The same first loss, with the weights loaded into either."""
    loaded = {**data(1, 1), "load_checkpoint": str(directory), "model.model_config.num_layers": 2}
    ours = {**loaded, "model.model_config.rms_norm_eps": 1e-5, "model.model_config.rope_theta": 10000.0}
    theirs = {**loaded, "pretrained_model_dir": str(directory)}
    found = [one.run(runs.loaded_loss, MODELS["llama"], settings)[0] for settings in (ours, theirs)]
    assert found[0] == pytest.approx(found[1], rel=1e-6)

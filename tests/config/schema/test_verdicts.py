"""The verdict on each key: honoured, accepted with a warning, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from lowtide.config.schema.callbacks import CALLBACKS
from support.schema_reading import errors, only_error, only_warning, read


@pytest.mark.parametrize(
    ("document", "path"),
    [
        ({"context": {"mode": 0}}, ("context", "mode")),
        ({"context": {"device_target": "Ascend"}}, ("context", "device_target")),
        ({"context": {"ascend_config": {"precision_mode": "x"}}}, ("context", "ascend_config")),
        ({"auto_trans_ckpt": True}, ("auto_trans_ckpt",)),
        ({"lr_scale_factor": 2.0}, ("lr_scale_factor",)),
        ({"micro_batch_interleave_num": 2}, ("micro_batch_interleave_num",)),
        ({"runner_config": {"sink_mode": True}}, ("runner_config", "sink_mode")),
        ({"runner_wrapper": {"local_norm": True}}, ("runner_wrapper", "local_norm")),
        ({"parallel_config": {"mem_coeff": 0.5}}, ("parallel_config", "mem_coeff")),
        ({"parallel": {"full_batch": True}}, ("parallel", "full_batch")),
        ({"model_config": {"qkv_concat": True}}, ("model_config", "qkv_concat")),
        ({"model_config": {"use_pad_tokens": True}}, ("model_config", "use_pad_tokens")),
        ({"moe_config": {"group_wise_a2a": True}}, ("moe_config", "group_wise_a2a")),
        ({"train_dataset": {"numa_enable": True}}, ("train_dataset", "numa_enable")),
        (
            {"train_dataset": {"data_loader": {"config": {"create_attention_mask": True}}}},
            ("train_dataset", "data_loader", "config", "create_attention_mask"),
        ),
        ({"callbacks": [{"type": "SDCMonitor", "anything": 1}]}, ("callbacks", 0, "type")),
    ],
)
def test_a_key_without_effect_is_accepted_with_one_warning(document: Any, path: tuple[str | int, ...]) -> None:
    problem = only_warning(document)
    assert problem.path == path
    assert "is accepted and has no effect here: " in problem.message


def test_a_key_without_effect_at_its_harmless_value_says_nothing() -> None:
    document = {
        "auto_trans_ckpt": False,
        "src_strategy_path_or_dir": "",
        "context": {"mode": 1, "save_graphs": False, "memory_optimize_level": "O0"},
        "model_config": {"qkv_concat": False, "fine_grain_interleave": 1, "quantization_bit": 0},
        "moe_config": {"comp_comm_parallel": False, "cold_token_percent": 1},
        "only_save_strategy": False,
    }
    problems = read(document)[1]
    assert problems.errors == problems.warnings == []


@pytest.mark.parametrize(
    ("document", "path"),
    [
        ({"run_mode": "predict"}, ("run_mode",)),
        ({"load_ckpt_format": "ckpt"}, ("load_ckpt_format",)),
        ({"only_save_strategy": True}, ("only_save_strategy",)),
        ({"layer_scale": True}, ("layer_scale",)),
        ({"layer_decay": 0.5}, ("layer_decay",)),
        ({"lr_scale": True}, ("lr_scale",)),
        ({"model_config": {"fp32_residual_connection": True}}, ("model_config", "fp32_residual_connection")),
        ({"model_config": {"ignore_token_id": 0}}, ("model_config", "ignore_token_id")),
        ({"parallel": {"parallel_mode": 2}}, ("parallel", "parallel_mode")),
        ({"parallel": {"parallel_mode": 3}}, ("parallel", "parallel_mode")),
        (
            {"parallel": {"pipeline_config": {"pipeline_scheduler": "seqpipe"}}},
            ("parallel", "pipeline_config", "pipeline_scheduler"),
        ),
        ({"parallel_config": {"seq_split_num": 2}}, ("parallel_config", "seq_split_num")),
        ({"optimizer": {"type": "Muon"}}, ("optimizer", "type")),
        ({"optimizer": {"nesterov": False}}, ("optimizer", "nesterov")),
        ({"model_config": {"fine_grain_interleave": 2}}, ("model_config", "fine_grain_interleave")),
        ({"model_config": {"use_3d_tensor_parallel": True}}, ("model_config", "use_3d_tensor_parallel")),
        ({"model_config": {"quantization_bit": 8}}, ("model_config", "quantization_bit")),
        ({"model_config": {"pet_config": {"pet_type": "lora"}}}, ("model_config", "pet_config")),
        (
            {"runner_wrapper": {"scale_sense": {"type": "AdaptiveLossScaleUpdateCell"}}},
            ("runner_wrapper", "scale_sense", "type"),
        ),
        ({"train_dataset": {"data_loader": {"type": "MindDataset"}}}, ("train_dataset", "data_loader", "type")),
        ({"train_dataset_task": {"type": "TranslationDataset"}}, ("train_dataset_task", "type")),
    ],
)
def test_a_value_that_cannot_be_honoured_is_an_error_that_says_what_to_do(document: Any, path: Any) -> None:
    problem = only_error(document)
    assert problem.path == path
    assert problem.hint


@pytest.mark.parametrize("name", ["AdamW", "FusedAdamW", "PmaAdamW"])
def test_adamw_is_honoured_under_each_of_its_names(name: str) -> None:
    assert read({"optimizer": {"type": name, "betas": [0.9, 0.95]}})[0].optimizer.type == name
    assert not errors({"optimizer": {"type": name}})


def test_an_unknown_callback_names_the_nearest() -> None:
    problem = only_error({"callbacks": [{"type": "MFLossMonitr"}]})
    assert problem.path == ("callbacks", 0, "type")
    assert "MFLossMonitor" in problem.hint


@pytest.mark.parametrize("name", sorted(CALLBACKS))
def test_each_honoured_callback_is_typed(name: str) -> None:
    needed = {"expert_num": 4, "capacity_factor": 1.5, "num_layers": 2, "mtp_depth": 0}
    item = {"type": name, **(needed if name == "MoEDropRateCallback" else {})}
    result, problems = read({"callbacks": [item], "moe_config": {"callback_moe_droprate": "Drop" in name}})
    assert not problems.errors
    assert type(result.callbacks[0]) is CALLBACKS[name]


def test_callback_and_callbacks_are_one_section() -> None:
    one = [{"type": "MFLossMonitor", "per_print_times": 3}]
    assert read({"callback": one})[0].callbacks == read({"callbacks": one})[0].callbacks
    assert "two names of one section" in only_error({"callback": one, "callbacks": one}).message


def test_the_model_config_may_be_in_either_of_two_sections_but_not_in_both() -> None:
    inner = {"num_layers": 4}
    assert read({"model": {"model_config": inner}})[0].model == read({"model_config": inner})[0].model
    assert "two places" in only_error({"model": {"model_config": inner}, "model_config": inner}).message

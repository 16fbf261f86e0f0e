"""The typed sections of a training file: verdicts, names, messages, rules between sections, and the JSON Schema."""

from __future__ import annotations

import copy
import json
import math
import pickle
import subprocess
import sys
import time
from functools import cache
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from lowtide.config.document import parse_document
from lowtide.config.problem import Problem, Problems
from lowtide.config.schema import Settings, json_schema, read_sections
from lowtide.config.schema.callbacks import CALLBACKS, IGNORED, OtherCallback
from lowtide.config.schema.catalogue import AS_WRITTEN, SECTIONS, section_class
from lowtide.config.schema.context import Context
from lowtide.config.schema.dataset import BlendConfig, DataLoader
from lowtide.config.schema.docstrings import descriptions
from lowtide.config.schema.field import Section, known_names
from lowtide.config.schema.memory import RecomputeConfig
from lowtide.config.schema.model import ModelConfig, ModelSection
from lowtide.config.schema.optimizer import Optimizer
from lowtide.config.schema.parallel import ParallelConfig
from lowtide.config.schema.reader import read_section
from lowtide.config.schema.runner import RunnerConfig, RunnerWrapper
from lowtide.config.schema.top_level import TopLevel

# Every key of MindSpore Transformers' training files that is known here, by section.
KEYS = {
    "": """seed output_dir run_mode load_checkpoint load_ckpt_format resume_training auto_trans_ckpt
        src_strategy_path_or_dir remove_redundancy transform_process_num use_parallel use_legacy pretrained_model_dir
        micro_batch_interleave_num only_save_strategy train_precision_sync layer_scale layer_decay lr_scale_factor
        print_separate_loss profile profile_start_step profile_stop_step init_start_profile profile_communication
        profile_memory profiler_level monitor_config""",
    "runner_config": "epochs batch_size sink_mode sink_size gradient_accumulation_steps stop_step num_classes",
    "runner_wrapper": """type use_clip_grad max_grad_norm scale_sense local_norm calculate_per_token_loss
        use_skip_data_by_global_norm global_norm_spike_threshold""",
    "parallel_config": """data_parallel model_parallel pipeline_stage context_parallel expert_parallel micro_batch_num
        use_seq_parallel gradient_aggregation_group vocab_emb_dp mem_coeff optimizer_shard context_parallel_algo
        ulysses_degree_in_cp seq_split_num""",
    "parallel": """parallel_mode enable_parallel_optimizer parallel_optimizer_config gradients_mean full_batch
        dataset_strategy enable_alltoall search_mode strategy_ckpt_config loss_repeated_mean pipeline_config""",
    "recompute_config": """recompute select_recompute select_comm_recompute select_recompute_exclude
        select_comm_recompute_exclude parallel_optimizer_comm_recompute mp_comm_recompute recompute_slice_activation""",
    "swap_config": "swap default_prefetch layer_swap op_swap",
    "context": """mode device_target device_id jit_config save_graphs save_graphs_path max_call_depth affinity_cpu_list
        ascend_config max_device_memory mempool_block_size memory_optimize_level deterministic""",
    "model_config": """model_type architectures vocab_size hidden_size num_hidden_layers num_layers num_attention_heads
        num_heads num_key_value_heads n_kv_heads intermediate_size head_dim hidden_act rms_norm_eps rope_theta theta
        max_position_embeddings seq_length tie_word_embeddings attention_dropout hidden_dropout initializer_range
        position_embedding_type scaling_factor beta_fast beta_slow mscale mscale_all_dim q_lora_rank kv_lora_rank
        qk_nope_head_dim qk_rope_head_dim v_head_dim qk_layernorm attention_bias add_qkv_bias n_routed_experts
        num_experts num_experts_per_tok moe_intermediate_size n_shared_experts first_k_dense_replace n_group topk_group
        routed_scaling_factor norm_topk_prob scoring_func moe_aux_loss_coeff moe_router_load_balancing_type
        moe_router_enable_expert_bias moe_router_bias_update_rate moe_token_drop_policy moe_z_loss_coeff
        num_nextn_predict_layers mtp_loss_factor mtp_loss_scaling_factor params_dtype compute_dtype
        layernorm_compute_dtype softmax_compute_dtype rotary_dtype router_dense_type offset pp_interleave_num
        start_stage stage_num use_flash_attention use_fused_rope apply_rope_fusion use_fused_swiglu bias_swiglu_fusion
        use_gmm moe_grouped_gemm use_fused_ops_permute moe_permute_fusion use_fused_ops_topkrouter qkv_concat
        mla_qkv_concat mlp_concat input_sliced_sig use_attn_mask_compression use_pad_tokens enable_gmm_safe_tokens
        fp32_residual_connection use_contiguous_weight_layout_attention npu_nums_per_device moe_token_dispatcher_type
        fine_grain_interleave use_3d_tensor_parallel quantization_bit pet_config""",
    "moe_config": """expert_num num_experts_chosen capacity_factor aux_loss_factor aux_loss_factors aux_loss_types
        routing_policy shared_expert_num topk_method n_group topk_group first_k_dense_replace moe_intermediate_size
        routed_scaling_factor z_loss_factor balance_via_topk_bias topk_bias_update_rate norm_topk_prob
        use_gating_sigmoid enable_sdrop use_gmm enable_gmm_safe_tokens callback_moe_droprate comp_comm_parallel
        comp_comm_parallel_degree group_wise_a2a enable_cold_hot_expert hot_expert_num cold_token_percent
        dispatch_global_max_bs enable_deredundency npu_nums_per_device""",
    "optimizer": """type betas eps weight_decay learning_rate swap momentum nesterov matched_adamw_rms ns_coefficients
        qk_clip_threshold""",
    "lr_schedule": """type learning_rate lr_end warmup_ratio warmup_steps warmup_epochs warmup_lr_init total_steps
        decay_steps decay_ratio num_cycles""",
    "grouped_lr_schedule": "default grouped",
    "train_dataset": """data_loader dataloader input_columns drop_remainder shuffle seed num_parallel_workers
        prefetch_size python_multiprocessing numa_enable construct_args_key use_broadcast_data""",
    "train_dataset_task": "type dataset_config",
    "processor": "tokenizer",
    "trainer": "type model_name",
    "training": "steps local_batch_size global_batch_size max_norm seed deterministic",
    "parallelism": """data_parallel_shard data_parallel_shard_strategy tensor_parallel context_parallel
        context_parallel_method pipeline_parallel pipeline_parallel_interleave_num pipeline_parallel_layers_per_stage
        expert_parallel cpu_offload reshard_after_forward_policy""",
    "checkpoint": "enable_save save_path save_max save_interleaved_steps load_path no_load_optim",
    "recompute": "mode full_recompute_layer select_module exclude_op",
    "recompute_comm": "enable select_module",
    "swap": "enable default_prefetch layer_swap op_swap",
}
BLEND = """data_path seq_length split seed eod pad eod_mask_loss reset_position_ids reset_attention_mask
    create_attention_mask create_compressed_eod_mask eod_pad_length"""

# The examples of the MindSpore Transformers guide.
SWAP_CASE = """
context:
  memory_optimize_level: "O0"
model:
  model_config:
    num_layers: 4
recompute_config:
  recompute: False
  select_recompute:
    'feed_forward': [0,3]
  select_comm_recompute: False
swap_config:
  swap: True
  op_swap:
    - op_name: 'attention'
      backward_prefetch: 20
      layers: [0,1,2]
    - op_name: 'feed_forward'
      backward_prefetch: 15
      layers: [1,2]
"""
RECOMPUTE_CASE = r"""
recompute_config:
  recompute: [[2,1,0,0,0],[1,0,0,0,0]]
  select_recompute:
    'feed_forward\.w1\.activation\.silu': True
    'feed_forward\.w1\.matmul': [[1,0,0,0,0],[2,1,0,0,0]]
    'feed_forward\.w3\.matmul': [2,1,0,0,0]
  select_comm_recompute: ['ffn_norm\.norm','attention_norm\.norm']
  parallel_optimizer_comm_recompute: True
  mp_comm_recompute: True
  recompute_slice_activation: True
"""
TRAINING_CASE = """
runner_config:
  gradient_accumulation_steps: 4
runner_wrapper:
  type: MFTrainOneStepCell
  use_clip_grad: True
  max_grad_norm: 1.0
moe_config:
  use_gmm: True
  enable_gmm_safe_tokens: True
  callback_moe_droprate: True
callback:
  - type: MoEDropRateCallback
    expert_num: 4
    capacity_factor: 1.5
    num_layers: 8
    mtp_depth: 1
model_config:
  use_fused_rope: True
  use_fused_swiglu: True
"""
NEWER_CASE = """
training: {steps: 10, local_batch_size: 1, global_batch_size: 8, max_norm: 1.0, seed: 1}
parallelism: {pipeline_parallel: 2, pipeline_parallel_layers_per_stage: ["0-3", "4-7"]}
model: {num_hidden_layers: 8, hidden_size: 64}
recompute: {mode: full, full_recompute_layer: ["0-3", 5]}
swap: {enable: true, layer_swap: [{backward_prefetch: 1, layers: ["6"], tier: disk}]}
"""
CASES = [SWAP_CASE, RECOMPUTE_CASE, TRAINING_CASE, NEWER_CASE]

for name in SECTIONS:
    section_class(name)  # imports it
ALL_SECTIONS = sorted(Section.__subclasses__(), key=lambda section: section.__name__)


def read(value: Any) -> tuple[Settings, Problems]:
    problems = Problems()
    return read_sections(value, problems), problems


def errors(value: Any) -> list[Problem]:
    return read(value)[1].errors


def only_error(value: Any) -> Problem:
    found = errors(value)
    assert len(found) == 1, [problem.message for problem in found]
    return found[0]


def only_warning(value: Any) -> Problem:
    problems = read(value)[1]
    assert not problems.errors, [problem.message for problem in problems.errors]
    assert len(problems.warnings) == 1, [problem.message for problem in problems.warnings]
    return problems.warnings[0]


# Names


@pytest.mark.parametrize("section", sorted(KEYS))
def test_every_key_of_the_reference_is_known(section: str) -> None:
    known = known_names(section_class(section) if section else TopLevel)
    assert [key for key in KEYS[section].split() if key not in known] == []


def test_keys_inside_sections_are_known() -> None:
    loader = {"type": "BlendedMegatronDatasetDataLoader", "config": dict.fromkeys(BLEND.split()), "sizes": [1, 0, 0]}
    wrapper = {"scale_sense": {"loss_scale_value": 4, "scale_factor": 2, "scale_window": 10}}
    parallel = {
        "parallel_optimizer_config": {"optimizer_weight_shard_size": 2, "gradient_accumulation_shard": True},
        "pipeline_config": {"pipeline_interleave": True, "pipeline_scheduler": "zero_bubble_v"},
    }
    document = {"train_dataset": {"data_loader": loader}, "runner_wrapper": wrapper, "parallel": parallel}
    result, problems = read(document)
    assert problems.errors == problems.warnings == []
    assert result.runner_wrapper.scale_sense.scale_window == 10  # type: ignore[union-attr]
    assert result.parallel.pipeline_config.pipeline_scheduler == "zero_bubble_v"


@pytest.mark.parametrize("section", ALL_SECTIONS, ids=lambda section: section.__name__)
def test_every_field_says_what_it_means(section: type[Section]) -> None:
    texts = descriptions(section)
    assert [name for name in section.model_fields if not texts.get(name, "").endswith(".")] == []
    assert section.__doc__


@pytest.mark.parametrize(
    ("one", "other", "value"),
    [
        ("num_layers", "num_hidden_layers", 4),
        ("num_attention_heads", "num_heads", 4),
        ("num_key_value_heads", "n_kv_heads", 4),
        ("rope_theta", "theta", 10000),
        ("n_routed_experts", "num_experts", 4),
        ("num_nextn_predict_layers", "mtp_num_layers", 1),
        ("use_gmm", "moe_grouped_gemm", True),
        ("use_fused_rope", "apply_rope_fusion", True),
        ("use_fused_swiglu", "bias_swiglu_fusion", True),
        ("use_fused_ops_permute", "moe_permute_fusion", True),
        ("enable_gmm_safe_tokens", "use_pad_tokens", True),
    ],
)
def test_two_names_of_a_setting_set_one_attribute(one: str, other: str, value: Any) -> None:
    for name in (one, other):
        result, problems = read({"model": {"model_config": {name: value}}})
        assert not problems.errors
        assert getattr(result.model, one) == value
    assert not errors({"model": {"model_config": {one: value, other: value}}})
    different = False if value is True else value + 1
    problem = only_error({"model": {"model_config": {one: value, other: different}}})
    assert problem.path == ("model", "model_config", other)
    assert f"`{one}`" in problem.message
    assert f"`{other}`" in problem.message


def test_two_names_that_differ_are_both_given_with_their_line() -> None:
    problems = Problems()
    document = parse_document("model_config:\n  num_layers: 4\n  num_hidden_layers: 5\n", problems)
    read_sections(document.value, problems)
    assert "(lines 2 and 3)" in problems.errors[0].message
    assert problems.errors[0].line == 3


@pytest.mark.parametrize(
    "section",
    [
        "recompute_config",
        "swap_config",
        "moe_config",
        "parallel_config",
        "runner_config",
        "recompute",
        "recompute_comm",
        "swap",
    ],
)
def test_an_unknown_key_is_an_error_in_sections_with_a_fixed_form(section: str) -> None:
    problem = only_error({section: {"zzz_strange": 1}})
    assert problem.path == (section, "zzz_strange")
    assert "`zzz_strange` is not known" in problem.message


def test_an_unknown_key_is_a_warning_in_other_sections() -> None:
    for section in ("context", "parallel", "train_dataset", "processor", "trainer", "optimizer"):
        problem = only_warning({section: {"zzz_strange": 1}})
        assert problem.path == (section, "zzz_strange")
        assert "not known to lowtide" in problem.message
    assert only_warning({"zzz_strange": {}}).path == ("zzz_strange",)


def test_a_slip_of_the_pen_is_an_error_everywhere() -> None:
    problem = only_error({"context": {"max_device_memry": "58GB"}})
    assert problem.hint == "did you mean `max_device_memory`?"
    assert only_error({"recompte_config": {}}).hint == "did you mean `recompute_config`?"
    assert only_error({"model": {"model_config": {"num_layer": 4}}}).hint == "did you mean `num_layers`?"


def test_a_section_inside_another_is_an_error() -> None:
    problem = only_error({"model": {"recompute_config": {"recompute": True}}})
    assert problem.path == ("model", "recompute_config")
    assert "section of its own" in problem.message


def test_a_key_outside_its_section_is_sent_there() -> None:
    problem = only_error({"runner_config": None, "gradient_accumulation_steps": 4})
    assert "a key of `runner_config`" in problem.message
    assert "runner_config:\n  gradient_accumulation_steps:" in problem.hint
    assert "a key of `model.model_config`" in only_error({"model": {"num_layers": 4}}).message


# Verdicts


@pytest.mark.parametrize(
    ("document", "path"),
    [
        ({"context": {"mode": 0}}, ("context", "mode")),
        ({"context": {"device_target": "Ascend"}}, ("context", "device_target")),
        ({"context": {"ascend_config": {"precision_mode": "x"}}}, ("context", "ascend_config")),
        ({"auto_trans_ckpt": True}, ("auto_trans_ckpt",)),
        ({"layer_decay": 0.5}, ("layer_decay",)),
        ({"micro_batch_interleave_num": 2}, ("micro_batch_interleave_num",)),
        ({"runner_config": {"sink_mode": True}}, ("runner_config", "sink_mode")),
        ({"runner_wrapper": {"local_norm": True}}, ("runner_wrapper", "local_norm")),
        ({"parallel_config": {"mem_coeff": 0.5}}, ("parallel_config", "mem_coeff")),
        ({"parallel": {"full_batch": True}}, ("parallel", "full_batch")),
        ({"model_config": {"qkv_concat": True}}, ("model_config", "qkv_concat")),
        ({"model_config": {"use_pad_tokens": True}}, ("model_config", "use_pad_tokens")),
        ({"moe_config": {"group_wise_a2a": True}}, ("moe_config", "group_wise_a2a")),
        ({"train_dataset": {"numa_enable": True}}, ("train_dataset", "numa_enable")),
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


def test_the_model_config_may_stand_in_two_places_but_not_in_both() -> None:
    inner = {"num_layers": 4}
    assert read({"model": {"model_config": inner}})[0].model == read({"model_config": inner})[0].model
    assert "two places" in only_error({"model": {"model_config": inner}, "model_config": inner}).message


# Types and messages


@pytest.mark.parametrize(
    ("document", "message", "hint"),
    [
        ({"model_config": {"num_layers": "4"}}, "`num_layers` must be a whole number, found the text '4'", "4 without"),
        ({"model_config": {"num_layers": True}}, "`num_layers` must be a whole number, found true", "number, such as"),
        ({"model_config": {"num_layers": 4.0}}, "`num_layers` must be a whole number, found the number 4.0", "write 4"),
        ({"model_config": {"num_layers": 0}}, "`num_layers` must be at least 1, found 0", ""),
        ({"model_config": {"num_layers": 10_001}}, "`num_layers` must be at most 10,000, found 10001", ""),
        ({"model_config": {"pp_interleave_num": 1025}}, "`pp_interleave_num` must be at most 1,024, found 1025", ""),
        ({"model_config": {"start_stage": -1}}, "`start_stage` must be at least 0, found -1", ""),
        ({"parallel_config": {"pipeline_stage": 65_537}}, "`pipeline_stage` must be at most 65,536, found 65537", ""),
        ({"runner_wrapper": {"max_grad_norm": 0}}, "`max_grad_norm` must be above 0, found 0", ""),
        ({"runner_wrapper": {"use_clip_grad": 1}}, "`use_clip_grad` must be true or false, found the number 1", "true"),
        ({"optimizer": {"eps": "1e-5"}}, "`eps` must be a number, found the text '1e-5'", "1e-5 without quotes"),
        ({"optimizer": {"eps": math.nan}}, "`eps` must be a finite number, found nan", ""),
        ({"optimizer": {"betas": [0.9, "x"]}}, "`betas[1]` must be a number, found the text 'x'", ""),
        ({"context": "memory_optimize_level=O0"}, "must be a mapping, found the text 'memory_optimize_l", "colon"),
        ({"context": {"max_device_memory": "58 parsecs"}}, "must be a size such as \"58GB\"", "24GiB"),
        ({"runner_config": {"gradient_accumulation_steps": True}}, "must be a whole number, found true", ""),
        ({"callbacks": {"type": "MFLossMonitor"}}, "`callbacks` must be a list, found a mapping", "- type"),
        ({"recompute": True}, "`recompute` must be a mapping, found true", "recompute_config:\n  recompute: true"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_told_in_plain_words(document: Any, message: str, hint: str) -> None:
    problem = only_error(document)
    assert message in problem.message
    assert hint in problem.hint


def test_key_equals_value_is_shown_with_a_colon() -> None:
    problem = only_error({"context": "memory_optimize_level=O0"})
    assert problem.hint.endswith('context:\n  memory_optimize_level: "O0"')


def test_a_wrong_choice_names_the_choices_that_work() -> None:
    problem = only_error({"parallel": {"pipeline_config": {"pipeline_scheduler": "1f1c"}}})
    assert "one of gpipe, 1f1b, zero_bubble_v" in problem.message
    assert problem.hint == "did you mean 1f1b?"


def test_no_message_has_the_jargon_of_a_library() -> None:
    document = {
        name: {key: object() for key in known_names(section_class(name))} for name in SECTIONS if name != "model"
    }
    text = " ".join(f"{problem.message} {problem.hint}" for problem in errors(document))
    for word in ("pydantic", "Input should", "type=", "https://", "Annotated", "NoneType", "Section"):
        assert word not in text


def test_problems_of_sections_come_in_the_order_of_the_file() -> None:
    document = {"model": {"model_config": {"num_layers": "4"}}, "callbacks": 1, "runner_config": {"epochs": "1"}}
    assert [problem.path[0] for problem in errors(document)] == list(document)


def test_whole_numbers_are_numbers() -> None:
    result = read({"optimizer": {"weight_decay": 1}})[0]
    assert type(result.optimizer.weight_decay) is float


def test_null_leaves_the_default() -> None:
    result, problems = read({"runner_config": {"gradient_accumulation_steps": None}, "context": None})
    assert result.runner_config.gradient_accumulation_steps == 1
    assert problems.errors == problems.warnings == []
    assert "context" not in result.present


def test_a_broken_value_leaves_its_default_and_the_rest_is_read() -> None:
    result = read({"parallel_config": {"pipeline_stage": "x", "model_parallel": 8}})[0]
    assert result.parallel_config == ParallelConfig(model_parallel=8)


def test_sizes_are_bytes() -> None:
    assert read({"context": {"max_device_memory": "58GB"}})[0].context.max_device_memory == 58 * 10**9


def test_the_offset_and_the_memory_settings_are_handed_on_as_written() -> None:
    result, problems = read(
        {"model_config": {"offset": [[0, "x"]]}, "recompute_config": {"recompute": "odd"}, "swap_config": {"swap": 1}}
    )
    assert result.model.offset == [[0, "x"]]
    assert result.recompute_config.recompute == "odd"  # type: ignore[comparison-overlap]
    assert result.swap_config.swap == 1
    assert problems.errors == []


def test_sections_are_frozen_values() -> None:
    section = RunnerConfig(epochs=2)
    with pytest.raises(ValidationError, match="frozen"):
        section.epochs = 3
    with pytest.raises(ValidationError, match="epoch"):
        RunnerConfig(epoch=2)  # type: ignore[call-arg]
    assert section.model_copy(update={"batch_size": 4}) == RunnerConfig(epochs=2, batch_size=4)
    assert section != RunnerConfig()
    assert pickle.loads(pickle.dumps(section)) == copy.deepcopy(section) == section


@pytest.mark.parametrize("section", ALL_SECTIONS, ids=lambda section: section.__name__)
def test_every_section_is_a_strict_and_frozen_pydantic_model(section: type[Section]) -> None:
    assert issubclass(section, BaseModel)
    assert section.model_config["strict"]
    assert section.model_config["frozen"]
    assert section.model_validate({}) == section.model_construct() == section()


@pytest.mark.parametrize(
    ("section", "name", "good", "bad"),
    [
        (RunnerConfig, "epochs", [3, None], ["3", 3.0, True, 0, 10**400]),
        (RunnerWrapper, "max_grad_norm", [1, 0.5], ["1", 0, math.inf, math.nan, 10**400, -(10**400)]),
        (RunnerWrapper, "scale_sense", [2.0, {"scale_window": 10}], [-1, {"scale_window": "10"}, []]),
        (Optimizer, "betas", [[0.9, 1], []], [[0.9, 1.5], ["0.9"], 0.9]),
        (Context, "mode", [0, 1], [True, 1.0, 2, "\ud800"]),
        (Context, "max_device_memory", ["58GB", 58], ["58 parsecs", "0GB", 0, -1, 10**400, 5.5, True, "9" * 50]),
        (DataLoader, "config", [{"seq_length": 4}, BlendConfig(seed=1)], [{"seq_length": 0}, "x"]),
        (ModelSection, "model_config", [{"num_layers": 4}], [{"num_layers": "4"}]),
        (RecomputeConfig, "recompute", [True, None, "odd", [[object()]]], []),
    ],
)
def test_values_are_validated_by_pydantic(section: type[Section], name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        section.model_validate({name: value})
        assert not read_problems(section, {name: value}).errors
    for value in bad:
        with pytest.raises(ValidationError):
            section.model_validate({name: value})
        assert len(read_problems(section, {name: value}).errors) == 1


def read_problems(section: type[Section], value: Any) -> Problems:
    problems = Problems()
    read_section(section, value, (), problems)
    return problems


def test_one_error_of_a_value_with_several_ways_is_told_in_the_way_it_was_meant() -> None:
    loader = {"config": {"data_path": [1, "x", None]}}
    problem = only_error({"train_dataset": {"data_loader": loader}})
    assert problem.path == ("train_dataset", "data_loader", "config", "data_path", 2)
    assert problem.message == "`data_path[2]` must be text, a whole number or a number, found nothing (null)"
    assert only_error({"model_config": {"moe_aux_loss_coeff": [1, -1]}}).message.startswith("`moe_aux_loss_coeff[1]`")
    assert "at least 0" in only_error({"model_config": {"moe_aux_loss_coeff": -1}}).message
    assert "a number or a list of numbers" in only_error({"model_config": {"moe_aux_loss_coeff": "x"}}).message


def test_problems_of_a_section_come_in_the_order_of_its_keys() -> None:
    document = {"zzz": 1, "search_mode": "x", "pipeline_config": {"zzz": 1}, "full_batch": True}
    assert [problem.path[1] for problem in read({"parallel": document})[1].warnings] == list(document)


def test_absent_sections_are_defaults() -> None:
    result = read({})[0]
    assert result.layout == "graph"
    assert result.present == frozenset()
    for name in SECTIONS:
        if name not in ("model", "model_config", "lr_scheduler"):
            assert getattr(result, name) == section_class(name)()
    assert result.top_level.use_legacy is True
    assert result.parallel.pipeline_config.pipeline_interleave is None
    assert result.model == ModelConfig()


# Layouts


@pytest.mark.parametrize("key", ["training", "parallelism", "recompute", "recompute_comm", "swap"])
def test_the_layout_of_2026_is_told_by_its_sections(key: str) -> None:
    result, problems = read({key: {}, "model": {"num_hidden_layers": 7}})
    assert result.layout == "2026"
    assert result.model.num_layers == 7
    assert not problems.errors


@pytest.mark.parametrize("old", ["runner_config", "parallel_config", "recompute_config", "swap_config"])
def test_two_layouts_in_one_file_are_an_error_that_names_both(old: str) -> None:
    problem = only_error({old: {}, "training": {}})
    assert f"`{old}`" in problem.message
    assert "`training`" in problem.message


def test_a_section_of_the_other_layout_is_an_error() -> None:
    assert "graph layout" in only_error({"training": {}, "moe_config": {}}).message
    assert "`lr_schedule`" in only_error({"runner_config": {}, "lr_scheduler": {}}).hint
    assert "directly under `model`" in only_error({"training": {}, "model": {"model_config": {}}}).hint


def test_layers_per_stage_are_checked_in_their_spelling() -> None:
    for good in ("auto", ["0-3", "4-7"], ["0-1,4-5", "2-3, 6"]):
        assert not errors({"parallelism": {"pipeline_parallel_layers_per_stage": good}})
    for bad in (["0..3"], ["a"], [""], ["1-"], "all", [3]):
        assert only_error({"parallelism": {"pipeline_parallel_layers_per_stage": bad}}).path[:2] == (
            "parallelism",
            "pipeline_parallel_layers_per_stage",
        )


# Rules between settings

DROP_RATE = {"type": "MoEDropRateCallback", "expert_num": 4, "capacity_factor": 1.5, "num_layers": 8, "mtp_depth": 1}


def test_drop_rate_needs_its_switch_and_its_callback() -> None:
    switch = {"moe_config": {"callback_moe_droprate": True}}
    assert not errors({**switch, "callback": [DROP_RATE]})
    assert "MoEDropRateCallback" in only_error(switch).message
    assert "MoEDropRateCallback" in only_error({**switch, "callbacks": [{"type": "MFLossMonitor"}]}).message
    problem = only_error({"callback": [DROP_RATE]})
    assert "callback_moe_droprate" in problem.message
    assert problem.path == ("callback", 0, "type")


@pytest.mark.parametrize("key", ["expert_num", "capacity_factor", "num_layers", "mtp_depth"])
def test_drop_rate_needs_all_four_parameters(key: str) -> None:
    item = {name: value for name, value in DROP_RATE.items() if name != key}
    problem = only_error({"moe_config": {"callback_moe_droprate": True}, "callbacks": [item]})
    assert problem.message.endswith(f"missing: {key}")


def test_accumulation_has_no_effect_with_a_pipeline() -> None:
    document = {"runner_config": {"gradient_accumulation_steps": 4}, "parallel_config": {"pipeline_stage": 2}}
    assert "micro_batch_num" in only_warning(document).hint
    result = read(document)[0]
    assert result.runner_config.gradient_accumulation_steps == 1
    with pytest.raises(AttributeError, match="frozen"):
        result.layout = "2026"  # type: ignore[misc]
    document["parallel_config"] = {"pipeline_stage": 1}
    assert read(document)[0].runner_config.gradient_accumulation_steps == 4


def test_a_pipeline_needs_as_many_micro_batches_as_stages() -> None:
    problem = only_error({"parallel_config": {"pipeline_stage": 4, "micro_batch_num": 3}})
    assert problem.path == ("parallel_config", "micro_batch_num")
    assert not errors({"parallel_config": {"pipeline_stage": 4, "micro_batch_num": 4}})
    assert not errors({"parallel_config": {"pipeline_stage": 1, "micro_batch_num": 1}})


def test_swap_asks_for_memory_optimize_level_o0() -> None:
    document = {"context": {"memory_optimize_level": "O1"}, "swap_config": {"swap": True}}
    assert '"O0" with swap' in only_warning(document).message
    assert "no effect" in only_warning({"context": {"memory_optimize_level": "O1"}}).message


def test_other_pairs_of_settings_are_checked() -> None:
    assert "no effect without" in only_warning({"parallel_config": {"use_seq_parallel": True}}).message
    hybrid = {"context_parallel": 4, "context_parallel_algo": "hybrid_cp", "ulysses_degree_in_cp": 3}
    assert "must divide" in only_error({"parallel_config": hybrid}).message
    assert "spike_threshold" in only_error({"runner_wrapper": {"use_skip_data_by_global_norm": True}}).message
    assert "warmup_ratio" in only_error({"lr_schedule": {"warmup_epochs": 1}}).message
    assert "two numbers" in only_error({"optimizer": {"betas": [0.9]}}).message


def test_an_alias_of_the_data_set_is_told_once() -> None:
    data = {"numa_enable": True}
    document = {"train_dataset": data, "train_dataset_task": {"dataset_config": data}}
    assert only_warning(document).path == ("train_dataset", "numa_enable")


# The JSON Schema


@cache
def schema_of_files() -> dict[str, Any]:
    return json_schema()


def schema_errors(document: Any) -> list[Any]:
    return list(jsonschema.Draft202012Validator(schema_of_files()).iter_errors(document))


def test_the_json_schema_is_valid_and_plain_json() -> None:
    schema = schema_of_files()
    jsonschema.Draft202012Validator.check_schema(schema)
    assert json.loads(json.dumps(schema)) == schema
    assert schema["$schema"].endswith("2020-12/schema")


def test_the_json_schema_describes_every_key() -> None:
    schema = schema_of_files()
    missing = [name for name, one in schema["properties"].items() if not one.get("description")]
    for name, definition in schema["$defs"].items():
        missing += [f"{name}.{key}" for key, one in definition["properties"].items() if not one.get("description")]
    assert missing == []
    assert set(SECTIONS) | {"callbacks", "callback"} | set(known_names(TopLevel)) == set(schema["properties"])
    for section in ALL_SECTIONS:
        if section not in (TopLevel, OtherCallback):
            assert set(known_names(section)) == set(schema["$defs"][section.__name__]["properties"])


@pytest.mark.parametrize("text", CASES)
def test_the_json_schema_and_the_reader_accept_the_guides_examples(text: str) -> None:
    problems = Problems()
    document = parse_document(text, problems)
    read_sections(document.value, problems)
    assert problems.errors == []
    assert schema_errors(document.value) == []


@pytest.mark.parametrize(
    "document",
    [
        {"model": {"model_config": {"num_layers": "4"}}},
        {"training": {}, "model": {"num_layers": "4"}},
        {"recompute_config": {"recompte": True}},
        {"recompute_config": {"recompute": "all"}},
        {"recompute_config": {"select_recompute": 3}},
        {"swap_config": {"op_swap": [{"op_name": "attention", "tier": "tape"}]}},
        {"swap": {"enable": "yes"}},
        {"recompute": {"mode": "half"}},
        {"recompute_config": {}, "training": {}},
        {"callbacks": [{"type": "Nothing"}]},
        {"callbacks": [{"type": "MFLossMonitor", "per_print_times": 0}]},
        {"run_mode": "predict"},
        {"context": {"max_device_memory": "58 parsecs"}},
    ],
)
def test_the_json_schema_rejects_what_is_wrong(document: Any) -> None:
    assert schema_errors(document)


# Any input

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70_000),
    st.sampled_from([10**400, -(10**400), 2**63, math.inf, -math.inf, math.nan, 1e308, "\ud800", "a=b\n", "x" * 5000]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["O0", "auto", "AdamW", "true", "4", "58GB", "MoEDropRateCallback", "bfloat16"]),
)
ALL_KEYS = sorted({key for section in ALL_SECTIONS for key in known_names(section)})
NAMES = st.one_of(st.sampled_from(ALL_KEYS), st.sampled_from(sorted(SECTIONS)), st.text(max_size=6), st.just("\udfff"))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner),
        st.dictionaries(NAMES, inner, max_size=5),
        st.fixed_dictionaries({"type": st.sampled_from([*CALLBACKS, *IGNORED])}, optional={"num_layers": inner}),
    ),
    max_leaves=12,
)
DOCUMENTS = st.dictionaries(st.one_of(st.sampled_from([*SECTIONS, "callback", "callbacks"]), NAMES), VALUES, max_size=6)


def exists(path: tuple[str | int, ...], value: Any) -> bool:
    for part in path:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return False
    return True


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(DOCUMENTS)
def test_any_document_is_read_without_raising_and_each_problem_has_its_place(document: dict[str, Any]) -> None:
    result, problems = read(document)
    for problem in problems.errors + problems.warnings:
        assert problem.message
        assert exists(problem.path[:-1], document), problem
        problem.message.encode()  # a lone surrogate could not be printed
        problem.hint.encode()
        assert len(problem.message) < 2000
    for name in SECTIONS:
        if name not in ("model_config", "lr_scheduler"):
            assert isinstance(getattr(result, name), Section)


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_any_value_is_read_without_raising(value: Any) -> None:
    read(value)


@pytest.mark.parametrize(
    "document",
    [
        {"context": {f"key{index}": index for index in range(50_000)}},
        {"recompute_config": {f"recompute{index}": index for index in range(50_000)}},
        {f"recompute_confi{index}": index for index in range(50_000)},
        {"optimizer": {"betas": ["x"] * 100_000}},
        {"train_dataset": {"input_columns": ["x"] * 100_000}},
        {"train_dataset": {"data_loader": {"handler": [1] * 100_000, "sizes": [1] * 100_000}}},
        {"train_dataset": {"data_loader": {"config": {"data_path": [1, "x"] * 50_000 + [None] * 100_000}}}},
        {"grouped_lr_schedule": {"grouped": [{"learning_rate": "x", "zzz": 1}] * 100_000}},
        {"grouped_lr_schedule": {"grouped": [{"learning_rate": "x"}] * 1000}},
        {"grouped_lr_schedule": {"grouped": ["x"] * 1000}},
        {"callbacks": [1] * 100_000},
        {"callbacks": [{"type": "nothing"}] * 100_000},
        {"model_config": {"x" * 200_000: 1}},
        {"model_config": {"num_layers": 10**5000, "rms_norm_eps": -(10**5000)}},
        {"parallelism": {"pipeline_parallel_layers_per_stage": ["1," * 50_000]}},
    ],
    ids=range(15),
)
def test_a_huge_document_costs_little(document: Any) -> None:
    start = time.process_time()
    problems = read(document)[1]
    assert time.process_time() - start < 1
    assert len(problems.errors) + len(problems.warnings) < 100


def test_reading_imports_no_unused_sections_and_builds_none() -> None:
    program = (
        "import sys\n"
        "from lowtide.config.problem import Problems\n"
        "from lowtide.config.schema import read_sections\n"
        "read_sections({'parallel_config': {'pipeline_stage': 2}}, Problems())\n"
        "names = [name for name in sys.modules if name.startswith('lowtide.config.schema.')]\n"
        "from lowtide.config.schema.field import Section\n"
        "print(*(name.rpartition('.')[2] for name in names))\n"
        "print(*(one.__name__ for one in Section.__subclasses__() if one.__pydantic_complete__))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    modules, built = done.stdout.splitlines()
    assert not {"model", "moe", "dataset", "optimizer", "callbacks", "document_schema"} & set(modules.split())
    assert built == ""


@pytest.mark.parametrize("name", AS_WRITTEN)
def test_sections_read_elsewhere_list_the_keys_of_their_class(name: str) -> None:
    assert sorted(AS_WRITTEN[name]) == sorted(section_class(name).model_fields)

"""The names of keys: which are known, which mean the same, which are slips of the pen."""

from __future__ import annotations

from typing import Any

import pytest

from lowtide.config.parse import parse_document
from lowtide.config.problem import Problems
from lowtide.config.schema import read_sections
from lowtide.config.schema.catalogue import section_class
from lowtide.config.schema.docstrings import descriptions
from lowtide.config.schema.field import Section, known_names
from lowtide.config.schema.top_level import TopLevel
from support.schema_reading import ALL_SECTIONS, errors, only_error, only_warning, read

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
        decay_steps decay_ratio num_cycles lr_end1 lr_end2 keep_steps final_steps decay_start_steps
        decay_start_ratio power base_lr eta_min t_max t_0 t_mult""",
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

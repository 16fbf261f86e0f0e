"""What a training file asks for, on as many processes as there are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lowtide.adaptive.settings import AdaptSettings
from lowtide.config.check import check_text
from lowtide.errors import ConfigError
from lowtide.models.shape import shape_of
from lowtide.operators.names import layer_operators
from lowtide.planner.pipeline import even_pipeline
from lowtide.train.job import refuse_context
from lowtide.train.pipeline import planned_pipeline, stages_of
from lowtide.train.run import Degrees, Run, read_run
from lowtide.train.without_effect import settings_without_effect

GRAPH = """
model: {model_config: {num_layers: 4, seq_length: 16}}
"""
NEWER = """
training: {steps: 10, local_batch_size: 2}
parallelism: {}
model: {num_hidden_layers: 4, seq_length: 16}
"""


def run_of(text: str, world: int | None = None, **overrides: Any) -> Run:
    paths = {tuple(key.split("__")): value for key, value in overrides.items()}
    return read_run(check_text(text, layer_operators, paths), world)


def test_without_parallel_settings_all_processes_share_the_data() -> None:
    assert run_of(GRAPH, 8).degrees == Degrees(replicate=8)
    assert run_of(NEWER, 8).degrees == Degrees(shard=8)


def test_the_parallel_optimizer_shares_parameters_too() -> None:
    sharded = {"parallel__enable_parallel_optimizer": True, "parallel_config__data_parallel": 8}
    assert run_of(GRAPH, 8, **sharded).degrees == Degrees(shard=8)
    size = {"parallel__parallel_optimizer_config__optimizer_weight_shard_size": 2}
    assert run_of(GRAPH, 8, **sharded, **size).degrees == Degrees(replicate=4, shard=2)


def test_ddp_becomes_fsdp_with_tensor_parallel_and_the_log_says_so() -> None:
    run = run_of(GRAPH, 4, parallel_config__data_parallel=2, parallel_config__model_parallel=2)
    assert run.degrees == Degrees(shard=2, tensor=2)
    assert any("FSDP" in note for note in run.notes)


def test_too_few_processes_are_an_error_that_says_how_many_to_start() -> None:
    with pytest.raises(ConfigError, match=r"asks for 6 processes.*and 4 were started; start 6"):
        run_of(GRAPH, 4, parallel_config__data_parallel=3, parallel_config__pipeline_stage=2)


def test_accumulation_has_no_effect_under_pipelining_and_micro_batches_have() -> None:
    more = {"runner_config__gradient_accumulation_steps": 4, "runner_config__batch_size": 2}
    assert run_of(GRAPH, 1, **more).micro_steps == 4
    pipelined = {"parallel_config__pipeline_stage": 2, "parallel_config__micro_batch_num": 6}
    assert run_of(GRAPH, 2, **more, **pipelined).micro_steps == 6


def test_a_step_is_the_global_batch_of_the_newer_layout() -> None:
    run = run_of(NEWER, 4, training__global_batch_size=24)
    assert (run.micro_steps, run.samples_per_step, run.steps) == (3, 24, 10)
    with pytest.raises(ConfigError, match="expected a multiple of local_batch_size 2 x 4"):
        run_of(NEWER, 4, training__global_batch_size=20)


def test_context_parallel_is_among_the_degrees() -> None:
    run = run_of(GRAPH, 4, parallel_config__context_parallel=2, parallel_config__data_parallel=2)
    assert (run.degrees.context, run.degrees.data, run.degrees.world) == (2, 2, 4)
    newer = run_of(NEWER, 4, parallelism__context_parallel=2)
    assert (newer.degrees.context, newer.degrees.data, newer.samples_per_step) == (2, 2, 4)
    assert any("exchanges heads for tokens" in note for note in run.notes)
    asked = run_of(NEWER, 4, parallelism__context_parallel=2, parallelism__context_parallel_method="ring")
    assert any("context_parallel_method ring" in note for note in asked.notes)
    with pytest.raises(ConfigError, match="not spread over ranks that share samples"):
        run_of(
            GRAPH,
            4,
            parallel_config__context_parallel=2,
            parallel_config__data_parallel=2,
            parallel_config__expert_parallel=2,
        )


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"num_key_value_heads": 1}, "1 heads of queries and keys cannot be spread evenly"),
        ({"seq_length": 33}, "samples of 33 tokens cannot be split into 2 equal parts"),
    ],
)
def test_a_model_that_does_not_go_with_context_parallel_is_refused_before_it_is_built(
    more: dict[str, int], why: str
) -> None:
    model = {"vocab_size": 32, "hidden_size": 8, "num_attention_heads": 2, **more}
    paths = {("model", "model_config", name): value for name, value in model.items()}
    check = check_text(GRAPH, layer_operators, {**paths, ("parallel_config", "context_parallel"): 2})
    assert check.settings is not None
    run = read_run(check, 2)
    with pytest.raises(ConfigError, match=why):
        refuse_context(shape_of(check.settings), run)


def test_experts_must_divide_the_data_parallel_ranks() -> None:
    with pytest.raises(ConfigError, match="does not divide the 4"):
        run_of(GRAPH, 4, parallel_config__data_parallel=4, parallel_config__expert_parallel=3)


def test_the_stages_of_all_ranks_have_every_layer_once_where_the_placement_has_it() -> None:
    run = run_of(
        GRAPH,
        5,
        model__model_config__num_layers=48,
        model__model_config__pp_interleave_num=2,
        model__model_config__offset=[[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]],
        parallel_config__pipeline_stage=5,
    )
    stages = [stages_of(run.placement, rank) for rank in range(5)]
    assert run.schedule == "interleaved"
    assert [stage.number for stage in stages[2]] == [2, 7]
    assert [len(stage.layers) for rank in stages for stage in rank] == [4, 5, 5, 5, 5, 5, 5, 5, 5, 4]
    in_order = sorted((stage for rank in stages for stage in rank), key=lambda stage: stage.number)
    assert [layer for stage in in_order for layer in stage.layers] == list(range(48))
    assert [stage.first for stage in in_order] == [True] + [False] * 9
    assert [stage.last for stage in in_order] == [False] * 9 + [True]


def test_zero_bubble_v_folds_the_second_chunk_back() -> None:
    folded = {"parallel__pipeline_config__pipeline_scheduler": "zero_bubble_v"}
    pipelined = {"parallel_config__pipeline_stage": 2, "model__model_config__pp_interleave_num": 2}
    run = run_of(GRAPH, 2, **folded, **pipelined)
    assert run.schedule == "zero_bubble_v"
    assert [stage.number for stage in stages_of(run.placement, 0)] == [0, 3]
    assert [stage.layers for stage in stages_of(run.placement, 1)] == [(1,), (2,)]


def test_what_the_runner_does_not_carry_out_is_said() -> None:
    text = GRAPH + "moe_config: {expert_num: 4, topk_method: group_limited_greedy, enable_gmm_safe_tokens: true}\n"
    text += "callbacks: [{type: CheckpointMonitor, prefix: mine}, {type: MFLossMonitor}]\n"
    more = {("model", "model_config", "rotary_dtype"): "bf16", ("model", "model_config", "router_dense_type"): "fp32"}
    settings = check_text(text, layer_operators, more).settings
    assert settings is not None
    found = settings_without_effect(settings)
    assert [line.partition(":")[0] for line in found] == [
        "rotary_dtype",
        "topk_method",
        "enable_gmm_safe_tokens",
        "prefix",
    ]
    plain = check_text(GRAPH, layer_operators).settings
    assert plain is not None
    assert settings_without_effect(plain) == []


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_v"])
def test_the_planner_sees_the_parts_that_ranks_have(schedule: str) -> None:
    settings: dict[str, Any] = {
        "model__model_config__num_layers": 8,
        "model__model_config__pp_interleave_num": 2,
        "parallel_config": {"pipeline_stage": 2, "micro_batch_num": 4},
        "parallel__pipeline_config": {"pipeline_interleave": True, "pipeline_scheduler": schedule},
    }
    run = run_of(GRAPH, 2, **settings)
    assert planned_pipeline(run) == even_pipeline(8, 2, 2, 4, run.schedule)


@pytest.mark.parametrize("text", [GRAPH, NEWER], ids=["graph", "2026"])
def test_a_run_adapts_itself_where_the_file_asks_for_it(text: str) -> None:
    assert run_of(text).adapt is None
    assert run_of(text, adapt={"budget": "auto"}).adapt == AdaptSettings()
    quiet = {"adaptive_recompute_device_size": 1024, "profiling_step": 7, "verbosity": "quiet"}
    expected = AdaptSettings(budget=2**30, rescue=False, profiling_steps=7, verbose=False)
    assert run_of(text, adapt=quiet).adapt == expected
    assert run_of(text, adapt={"budget": "auto", "watch": "always"}).adapt == AdaptSettings(watch="always")


def test_a_device_size_above_the_devices_memory_is_warned_of() -> None:
    check = check_text(GRAPH, layer_operators, {("adapt",): {"device_size": 4096}})
    run = read_run(check, 1, device_memory=2**30)
    assert run.adapt == AdaptSettings(budget=2**30, rescue=False)
    assert run.warnings == ("adapt: device size 4 GiB is more than the device's memory: 1 GiB is used",)


EXPERTS = """
model: {model_config: {num_layers: 2, seq_length: 16, moe_intermediate_size: 8}}
moe_config: {expert_num: 4, balance_via_topk_bias: true, topk_bias_update_rate: 0.01}
callbacks: [{type: TopkBiasBalanceCallback, %s}]
"""


def test_a_callback_that_would_move_the_bias_otherwise_than_the_model_is_refused() -> None:
    assert run_of(EXPERTS % "topk_bias_update_rate: 0.01, balance_via_topk_bias: true")
    with pytest.raises(ConfigError, match=r"topk_bias_update_rate: 0\.5, and the model's settings give 0\.01"):
        run_of(EXPERTS % "topk_bias_update_rate: 0.5")
    with pytest.raises(ConfigError, match="balance_via_topk_bias: False"):
        run_of(EXPERTS % "balance_via_topk_bias: false")


def test_a_file_may_not_contradict_the_configuration_of_a_model_of_transformers(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 4, "hidden_size": 32, "rope_parameters": {"rope_theta": 5000.0}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    directory = {"pretrained_model_dir": str(tmp_path)}
    same = {"model__model_config__hidden_size": 32, "model__model_config__rope_theta": 5000.0}
    assert run_of(GRAPH, **directory, **same)
    for key, value, said in (
        ("hidden_size", 64, "hidden_size is 64 and hidden_size of the directory 32"),
        ("rope_theta", 1e4, "rope_theta is 10000"),
        ("n_routed_experts", 8, "config.json has no such key"),
        ("num_nextn_predict_layers", 1, "num_nextn_predict_layers is 1"),
    ):
        with pytest.raises(ConfigError, match=said):
            run_of(GRAPH, **directory, **{f"model__model_config__{key}": value})


def test_kernels_that_a_model_of_transformers_does_not_take_are_said(tmp_path: Path) -> None:
    paths = {
        ("pretrained_model_dir",): str(tmp_path),
        ("model", "model_config", "use_fused_rope"): True,
        ("model", "model_config", "use_fused_swiglu"): True,
        ("moe_config", "use_gmm"): True,
    }
    settings = check_text(GRAPH, layer_operators, paths).settings
    assert settings is not None
    said = settings_without_effect(settings)
    for key in ("use_fused_rope", "use_fused_swiglu", "use_gmm"):
        assert [one for one in said if one.startswith(f"{key}: True has no effect: the model of {tmp_path}")]
    plain = check_text(GRAPH, layer_operators, dict(list(paths.items())[1:])).settings
    assert plain is not None
    assert not settings_without_effect(plain)

"""The rules between settings of different sections."""

from __future__ import annotations

import pytest

from support.schema_reading import errors, only_error, only_warning, read

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


@pytest.mark.parametrize(
    ("key", "model"),
    [
        ("expert_num", {"moe_config": {"expert_num": 8}}),
        ("expert_num", {"model": {"model_config": {"num_layers": 8, "mtp_num_layers": 1, "n_routed_experts": 8}}}),
        ("num_layers", {"model": {"model_config": {"num_layers": 4, "num_nextn_predict_layers": 1}}}),
        ("mtp_depth", {"model": {"model_config": {"num_layers": 8}}}),
        ("capacity_factor", {"moe_config": {"capacity_factor": 1.1}}),
    ],
)
def test_drop_rate_parameters_are_the_models(key: str, model: dict[str, dict[str, object]]) -> None:
    switch: dict[str, object] = {**model.get("moe_config", {}), "callback_moe_droprate": True}
    problem = only_error({**model, "moe_config": switch, "callbacks": [DROP_RATE]})
    assert f"MoEDropRateCallback has `{key}`" in problem.message
    assert problem.path == ("callbacks", 0, key)
    agreed = {"model": {"model_config": {"num_layers": 8, "num_nextn_predict_layers": 1}}}
    same = {"expert_num": 4, "capacity_factor": 1.5, "callback_moe_droprate": True}
    assert not errors({**agreed, "moe_config": same, "callbacks": [DROP_RATE]})


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


def test_an_alias_of_the_data_set_is_reported_once() -> None:
    data = {"numa_enable": True}
    document = {"train_dataset": data, "train_dataset_task": {"dataset_config": data}}
    assert only_warning(document).path == ("train_dataset", "numa_enable")

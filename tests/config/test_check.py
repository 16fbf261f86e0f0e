from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lowtide.config.check import Check, check_text
from lowtide.operators.names import layer_operators
from lowtide.policy import Keep, Recompute, Swap


def check(text: str, **overrides: Any) -> Check:
    paths = {tuple(key.split("__")): value for key, value in overrides.items()}
    return check_text(text, layer_operators, paths)


MODEL = "model: {model_config: {num_layers: 4}}\n"


def test_all_errors_come_at_once() -> None:
    result = check(
        "model:\n  model_config:\n    num_layers: 9\n"
        "parallel_config:\n  pipeline_stage: 2\n"
        "recompute_config:\n  recompte: true\n  mp_comm_recompute: 1\n  select_recompute: ['(']\n"
        "swap_config:\n  swap: 'yes'\n  layer_swap: all\n"
        "runner_config:\n  epochs: many\n"
    )
    found = {problem.path: problem.message for problem in result.problems.errors}
    assert {path[-1] for path in found} >= {
        "offset",
        "recompte",
        "mp_comm_recompute",
        0,
        "swap",
        "layer_swap",
        "epochs",
    }
    assert result.as_json()["normalized"] == {}


def test_a_misspelt_key_is_pointed_at_with_the_nearest_name() -> None:
    result = check(MODEL + "recompute_config:\n  select_recompte: true\n")
    (problem,) = result.problems.errors
    assert (problem.line, problem.column) == (3, 3)
    assert "select_recompute" in problem.hint


def test_pipeline_interleave_off_means_one_chunk_and_says_so() -> None:
    text = "recompute_config: {recompute: [1, 1]}\n"
    switches: dict[str, Any] = {
        "model__model_config__num_layers": 8,
        "model__model_config__pp_interleave_num": 2,
        "parallel_config__pipeline_stage": 2,
    }
    on = check(text, **switches)
    assert on.as_json()["normalized"]["effective_interleave"] == 2
    off = check(text, **switches, parallel__pipeline_config__pipeline_interleave=False)
    assert off.as_json()["normalized"]["effective_interleave"] == 1
    assert any("taken as 1" in warning.message for warning in off.problems.warnings)


def test_number_of_layers_may_come_from_a_hugging_face_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 3}))
    result = check(f"pretrained_model_dir: {tmp_path}\nrecompute_config: {{recompute: true}}\n")
    assert result.ok
    assert result.as_json()["normalized"]["layer_list"] == [[3]]


def test_prediction_layers_take_the_decision_of_the_last_layer() -> None:
    result = check(
        "recompute_config: {recompute: [1, 4]}\n", **PIPELINE, model__model_config__num_nextn_predict_layers=2
    )
    assert result.policy is not None
    assert [str(layer.default) for layer in result.policy.layers] == ["recompute"] + ["keep"] * 3 + ["recompute"] * 6


PIPELINE: dict[str, Any] = {
    "model__model_config__num_layers": 8,
    "parallel_config__pipeline_stage": 2,
    "parallel_config__micro_batch_num": 2,
}


def test_layer_swap_moves_the_layers_input_too_and_recompute_wins_over_it() -> None:
    result = check(
        MODEL
        + "recompute_config: {recompute: [1]}\n"
        + "swap_config: {swap: true, layer_swap: [{backward_prefetch: 3, layers: [0, 1], tier: disk}]}\n"
    )
    assert result.policy is not None
    first, second, *_ = result.policy.layers
    assert (first.default, first.boundary) == (Swap(3, "disk"), Swap(3, "disk"))
    assert (second.default, second.boundary) == (Recompute(), Keep())


@pytest.mark.parametrize("name", ["'('", "''", "'(a+)+'", "[attention, '[']"])
def test_a_swapped_operators_name_must_be_a_pattern(name: str) -> None:
    result = check(
        MODEL + f"swap_config: {{swap: true, op_swap: {{op_name: {name}, backward_prefetch: 1, layers: true}}}}\n"
    )
    (problem,) = result.problems.errors
    assert problem.path[-1] == "op_name"


def test_2026_layer_that_is_recomputed_and_swapped_swaps_its_input() -> None:
    result = check(
        "model: {num_layers: 4}\nrecompute: {mode: full, full_recompute_layer: ['0']}\n"
        "swap: {enable: true, layer_swap: [{layers: ['0-1']}]}\n"
    )
    assert result.policy is not None
    first = result.policy.layers[0]
    assert (first.default, first.boundary) == (Recompute(), Swap(1, unit="layers"))


def test_2026_layers_per_stage_are_placed_chunk_by_chunk() -> None:
    text = (
        "model: {num_layers: 9}\nrecompute: {mode: full, full_recompute_layer: ['0']}\n"
        "parallelism:\n  pipeline_parallel: 2\n  pipeline_parallel_interleave_num: 2\n"
        "  pipeline_parallel_layers_per_stage: ['0-2,5-6', '3-4,7-8']\n"
    )
    result = check(text)
    assert result.as_json()["normalized"]["layer_list"] == [[3, 2], [2, 2]]
    wrong = check(text.replace("7-8", "6-8"))
    assert "every layer once" in wrong.problems.errors[0].message


def test_an_unknown_name_is_a_warning_without_a_model_with_the_nearest_names() -> None:
    result = check(MODEL + "recompute_config: {select_recompute: ['feed_foward\\.mul']}\n")
    assert result.ok
    (warning,) = result.problems.warnings
    assert "did you mean feed_forward.mul" in warning.message
    assert (warning.line, warning.column) == (2, 39)


def test_a_swap_that_feeds_a_recomputed_operator_is_said_to_be_lost() -> None:
    result = check(
        MODEL
        + "recompute_config: {select_recompute: {'feed_forward\\.mul': [0]}}\n"
        + "swap_config: {swap: true, op_swap: {op_name: 'feed_forward\\.w1\\.activation\\.silu',"
        + " backward_prefetch: 2, layers: true}}\n"
    )
    assert any("directly feeds feed_forward.mul" in warning.message for warning in result.problems.warnings)


@pytest.mark.parametrize("text", ["", "# nothing\n", "- a\n", "text\n", "3\n", "null\n"])
def test_a_file_without_sections_is_an_error_with_a_position(text: str) -> None:
    (problem,) = check(text).problems.errors
    assert problem.line >= 1
    assert problem.column >= 1

"""Every example of the MindSpore Transformers guide, with the guide's own log lines."""

from __future__ import annotations

from typing import Any

import pytest

from lowtide.config.check import Check, check_text
from lowtide.operators.names import layer_operators
from lowtide.policy import Keep, Recompute, Swap
from support.guide_examples import DEEPSEEK, FORTY_EIGHT_LAYERS, FORTY_EIGHT_LINES, SWAP_CASES


def check(text: str, **overrides: Any) -> Check:
    paths = {tuple(key.split("__")): value for key, value in overrides.items()}
    return check_text(text, layer_operators, paths)


def accepted(text: str, **overrides: Any) -> Check:
    result = check(text, **overrides)
    assert result.ok, result.as_json()["errors"]
    return result


def lines(result: Check, start: str) -> list[str]:
    return [text for _, text in result.log if text.startswith(start)]


def test_deepseek_example_recomputes_the_first_layers_of_each_stage() -> None:
    result = accepted(
        DEEPSEEK,
        model__model_config__num_layers=61,
        model__model_config__offset=[0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0],
        parallel_config__pipeline_stage=16,
        parallel_config__micro_batch_num=16,
    )
    assert lines(result, "Formative layer_recompute") == [
        "Formative layer_recompute: [[3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 3, 2, 0]]"
    ]
    assert result.policy is not None
    assert result.policy.communication.slice_inputs
    assert result.policy.communication.reshard_after_forward
    kept = [index for index, layer in enumerate(result.policy.layers) if layer.default == Keep()]
    assert kept == [54, 57, 58, 59, 60]


def test_deepseek_example_alone_asks_for_the_number_of_layers() -> None:
    result = check(DEEPSEEK)
    (problem,) = result.problems.errors
    assert (problem.line, problem.column) == (2, 1)
    assert "how many" in problem.message
    assert "--set model.model_config.num_layers=48" in problem.hint


def forty_eight_layers() -> Check:
    return accepted(
        FORTY_EIGHT_LAYERS,
        model__model_config__num_layers=48,
        model__model_config__pp_interleave_num=2,
        model__model_config__offset=[[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]],
        parallel_config__pipeline_stage=5,
        parallel_config__micro_batch_num=5,
    )


def test_48_layer_example_prints_the_guides_normal_form() -> None:
    result = forty_eight_layers()
    shown = [text for text in lines(result, "Formative") if "exclude" not in text]
    assert shown == FORTY_EIGHT_LINES


def test_48_layer_example_holds_a_setting_without_effect_and_we_say_so() -> None:
    (warning,) = [w for w in forty_eight_layers().problems.warnings if "w3" in w.message]
    assert "has no effect in layers 0,4,24: the whole layer is recomputed" in warning.message
    assert warning.line == 9


@pytest.mark.parametrize("case", SWAP_CASES)
def test_a_swap_case_gives_the_guides_own_lines(case: str) -> None:
    result = accepted(SWAP_CASES[case].text)
    assert lines(result, "Set") == SWAP_CASES[case].lines
    assert not result.problems.warnings


def test_swapped_attention_next_to_a_recomputed_feed_forward_stays_swapped() -> None:
    result = accepted(SWAP_CASES["4: swap and recompute"].text)
    assert result.resolution is not None
    decisions = result.resolution.layers[0].decisions
    assert decisions["feed_forward.mul"] == Recompute()
    assert decisions["attention.wo.matmul"] == Swap(20)  # it reaches the recomputed part only through an add


ELLIPSES = {
    "gradient accumulation, English": "runner_config:\n...\ngradient_accumulation_steps: 4\n...\n",
    "gradient accumulation, Chinese": "runner_config:\n  ...\n  gradient_accumulation_steps: 4\n  ...\n",
    "clipping, English": (
        "runner_wrapper:\ntype: MFTrainOneStepCell\n...\nuse_clip_grad: True\nmax_grad_norm: 1.0\n...\n"
    ),
    "clipping, Chinese": (
        "runner_wrapper:\n  type: MFTrainOneStepCell\n  ...\n  use_clip_grad: True\n  max_grad_norm: 1.0\n  ...\n"
    ),
    "grouped matmul": "moe_config:\n  ...\n  use_gmm: True\n  ...\n",
    "safe tokens": "moe_config:\n  ...\n  enable_gmm_safe_tokens: True\n  ...\n",
    "drop rate": (
        "moe_config:\n  ...\n  callback_moe_droprate: True\n  ...\n\ncallback:\n  ...\n  - type: MoEDropRateCallback\n"
        "    expert_num: 4\n    capacity_factor: 1.5\n    num_layers: 8\n    mtp_depth: 1\n  ...\n"
    ),
    "fused rope": "model_config:\n  ...\n  use_fused_rope: True\n  ...\n",
    "fused swiglu": "model_config:\n  ...\n  use_fused_swiglu: True\n  ...\n",
}


@pytest.mark.parametrize("name", ELLIPSES)
def test_an_ellipsis_is_an_error_that_shows_the_right_spelling(name: str) -> None:
    text = ELLIPSES[name]
    result = check(text)
    (problem,) = result.problems.errors
    assert "`...`" in problem.message
    assert text.splitlines()[problem.line - 1].strip() == "..."
    section = text.splitlines()[0]
    first = next(line for line in text.splitlines()[problem.line :] if line.strip() != "...")
    assert problem.hint == f"remove the line and indent the keys:\n{section}\n  {first.strip()}"


@pytest.mark.parametrize("name", ELLIPSES)
def test_the_same_example_without_its_ellipsis_is_accepted(name: str) -> None:
    lines = [line for line in ELLIPSES[name].splitlines() if line.strip() != "..."]
    indented = [line if line.endswith(":") or line.startswith(" ") or not line else f"  {line}" for line in lines]
    accepted("\n".join(indented) + "\n")


def test_a_key_with_an_equals_sign_is_an_error_that_shows_the_right_spelling() -> None:
    result = check("context:\n  memory_optimize_level=O0\n")
    (problem,) = result.problems.errors
    assert (problem.line, problem.column) == (2, 3)
    assert 'context:\n  memory_optimize_level: "O0"' in problem.hint


def test_without_a_pipeline_accumulation_keeps_its_value_and_with_one_it_is_said_to_have_none() -> None:
    text = "runner_config:\n  gradient_accumulation_steps: 4\n"
    assert not accepted(text).problems.warnings
    result = accepted(text, parallel_config__pipeline_stage=2, parallel_config__micro_batch_num=2)
    assert any("micro_batch_num" in w.message + w.hint for w in result.problems.warnings)

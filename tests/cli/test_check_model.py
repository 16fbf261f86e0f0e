"""``lowtide check FILE --model MODEL``: the file's settings on a model, and the bytes that each frees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lowtide.cli.main import app
from support.tiny_models import MODELS

TOKENS, HIDDEN, WIDE = 16, 32, 64
LEGACY = r"""
model:
  model_config:
    num_layers: 3
recompute_config:
  select_recompute:
    'feed_forward\.mul': True
    'feed_forward\.w1\.activation\.silu': [2]
    'add': True
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a configuration of each tiny model."""
    directory = tmp_path_factory.mktemp("models")
    for name in ("llama", "gpt2", "mixtral"):
        MODELS[name]().save_pretrained(directory / name)
    return directory


def run(tmp_path: Path, text: str, model: Path, *more: str) -> tuple[int, str, str]:
    file = tmp_path / "train.yaml"
    file.write_text(text)
    arguments = ["check", str(file), "--model", str(model), "--sequence", str(TOKENS), *more]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "100"})
    assert not isinstance(result.exception, Exception) or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def as_json(tmp_path: Path, text: str, model: Path, *more: str) -> Any:
    code, out, _ = run(tmp_path, text, model, "--json", *more)
    assert code == 0, out
    return json.loads(out)


def test_each_setting_is_shown_with_its_layers_operators_and_bytes(tmp_path: Path, models: Path) -> None:
    code, out, err = run(tmp_path, LEGACY, models / "llama")
    assert code == 0
    assert "on LlamaForCausalLM" in out
    assert "1 x 16 tokens" in out
    assert "   12 KiB  3: 0-2  recompute feed_forward\\.mul: mlp.mul\n" in out
    assert "    8 KiB  2: 0-1  recompute feed_forward\\.w1\\.activation\\.silu: mlp.act_fn\n" in out
    assert "  nothing  3: 0-2  recompute add\n" in out
    assert "frees 20 KiB of the" in out
    assert "`add` (recompute): recomputing it saves nothing" in err
    assert "train.yaml:9:5" in err


def test_json_has_the_same(tmp_path: Path, models: Path) -> None:
    value = as_json(tmp_path, LEGACY, models / "llama")
    size = TOKENS * WIDE * 4
    found = {one["setting"]: one for one in value["model"]["settings"]}
    assert found[r"feed_forward\.mul"]["freed"] == 3 * size
    assert found[r"feed_forward\.w1\.activation\.silu"] == {
        "setting": r"feed_forward\.w1\.activation\.silu",
        "action": "recompute",
        "layers": [0, 1],
        "operators": ["mlp.act_fn"],
        "decided": ["mlp.act_fn"],
        "freed": 2 * size,
        "idle": [],
        "kept": [],
    }
    assert found["add"]["idle"] == ["add"]
    assert value["model"]["freed"] == value["model"]["recomputed"] == 5 * size
    assert value["model"]["swapped"] == 0


@pytest.mark.parametrize("head", ["", "use_legacy: False\n"], ids=["legacy", "mcore"])
def test_the_default_selection_of_either_vocabulary_matches(head: str, tmp_path: Path, models: Path) -> None:
    value = as_json(tmp_path, f"{head}recompute_config: {{select_recompute: True}}\n", models / "llama")
    operators = [one["operators"] for one in value["model"]["settings"]]
    assert sorted(operators) == [["mlp.act_fn"], ["mlp.mul"]]
    assert value["model"]["freed"] == 6 * TOKENS * WIDE * 4


def test_the_models_number_of_layers_is_used_where_the_file_has_none(tmp_path: Path, models: Path) -> None:
    value = as_json(tmp_path, "recompute_config: {recompute: True}\n", models / "llama")
    assert value["normalized"]["layer_list"] == [[3]]


def test_another_number_of_layers_is_an_error_at_its_place(tmp_path: Path, models: Path) -> None:
    code, out, err = run(tmp_path, LEGACY.replace("num_layers: 3", "num_layers: 4"), models / "llama")
    assert code == 1
    assert "frees" not in out
    assert "the file decides 4 layers, and the model has 3" in err
    assert "train.yaml:4:17" in err


def test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_names(tmp_path: Path, models: Path) -> None:
    text = LEGACY.replace(r"feed_forward\.mul", r"feed_forward\.mull")
    code, out, err = run(tmp_path, text, models / "llama")
    assert code == 1
    assert "frees" not in out
    assert r"error: `feed_forward\.mull` (recompute) matches nothing in the model" in err
    assert "did you mean feed_forward.mul" in err
    assert "train.yaml:7:5" in err
    code, out, _ = run(tmp_path, text, models / "llama", "--json")
    assert code == 1
    assert json.loads(out)["model"] is None


def test_the_defaults_of_a_gated_model_do_not_fit_gpt2(tmp_path: Path, models: Path) -> None:
    code, _, err = run(tmp_path, "recompute_config: {select_recompute: True}\n", models / "gpt2")
    assert code == 1
    assert "did you mean feed_forward.w1.activation.gelu" in err


def test_swaps_free_what_the_operators_hold_and_overruled_ones_are_said(tmp_path: Path, models: Path) -> None:
    text = r"""
recompute_config: {select_recompute: {'feed_forward\.mul': [0]}}
swap_config:
  swap: True
  op_swap:
    - {op_name: 'feed_forward\.w3', backward_prefetch: 10, layers: [0, 2]}
    - {op_name: 'attention\.wo', backward_prefetch: 10, layers: [2]}
"""
    code, out, err = run(tmp_path, text, models / "llama")
    assert code == 0
    assert "4 KiB  1: 2    swap(10) feed_forward\\.w3: mlp.up_proj" in out
    assert "4 KiB by recompute and 4 KiB by swap" in out
    assert "has no effect in layer 0: mlp.up_proj directly feeds mlp.mul, which is recomputed" in err
    assert "swapping it frees nothing: self_attn.o_proj holds nothing for backward" in err


def test_names_of_the_model_itself_are_as_good(tmp_path: Path, models: Path) -> None:
    text = r"recompute_config: {select_recompute: ['mlp\.act_fn']}"
    code, out, err = run(tmp_path, text, models / "llama")
    assert (code, err) == (0, "")
    assert "recompute mlp\\.act_fn: mlp.act_fn" in out


def test_the_form_of_2026_is_matched_as_well(tmp_path: Path, models: Path) -> None:
    text = "model: {num_layers: 3}\nrecompute: {mode: select, select_module: {'self_attention.*': ['1-2']}}\n"
    _, out, _ = run(tmp_path, text, models / "llama")
    assert "2: 1-2  recompute self_attention.*: self_attn\n" in out


@pytest.mark.skipif(torch.__version__ >= "2.15", reason="there its grouped matmul has a fake kernel for fp32")
def test_a_model_that_does_not_run_is_an_error_in_words(tmp_path: Path, models: Path) -> None:
    code, _, err = run(tmp_path, LEGACY, models / "mixtral")
    assert code == 1
    assert "does not run with fake tensors" in err
    assert "Traceback" not in err


def test_a_model_that_is_missing_is_an_error_in_words(tmp_path: Path, models: Path) -> None:
    code, _, err = run(tmp_path, LEGACY, models / "missing")
    assert code == 1
    assert "neither a directory" in err


@pytest.mark.parametrize("option", [("--batch", "2"), ("--sequence", "8"), ("--autocast", "bf16"), ("--layers", "h")])
def test_an_option_about_the_model_without_a_model_is_a_usage_error(option: tuple[str, str], tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(LEGACY)
    result = CliRunner().invoke(app, ["check", str(file), *option])
    assert result.exit_code == 2
    assert "name one with --model" in result.stderr


def test_a_file_that_is_wrong_by_itself_is_an_error_with_a_model_too(tmp_path: Path, models: Path) -> None:
    code, _, err = run(tmp_path, LEGACY.replace("select_recompute", "select_recompte"), models / "llama")
    assert code == 1
    assert "did you mean" in err

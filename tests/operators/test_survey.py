"""Whole models: unmodified ones of transformers, torch's own encoder, plain modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from lowtide.cli.main import app
from lowtide.operators.observation import Pack
from lowtide.operators.survey import survey
from lowtide.policy import LayerPolicy, Pattern, Policy, Recompute, Rule, resolve
from support.tiny_models import MODELS, surveyed


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_every_saved_tensor_of_a_transformers_model_has_an_owner(name: str, autocast: bool) -> None:
    found, _ = surveyed(name, autocast=autocast)
    (kind,) = found.kinds
    names = {operator.name for operator in kind.operators}
    for pack in kind.packs:
        assert pack.operator
        assert (pack.owner in names) == (pack.source == "operator")


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_the_parts_add_up_to_all_that_is_held(name: str, autocast: bool) -> None:
    """Owned bytes, input, outside, static and kept are each storage exactly once."""
    (kind,) = surveyed(name, autocast=autocast)[0].kinds
    total = sum({pack.storage: pack.storage_bytes for pack in kind.packs}.values())
    owned = sum(operator.owned for operator in kind.operators)
    assert owned + kind.boundary + kind.root + kind.static + kind.kept == total


def test_net_bytes_are_those_of_the_arithmetic() -> None:
    found, _ = surveyed("llama")
    bytes_of = {operator.name: operator for operator in found.kinds[0].operators}
    tokens, hidden, wide = 2 * 8, 32, 64
    for name in ("mlp.act_fn", "mlp.mul", "mlp.gate_proj", "mlp.up_proj"):
        assert bytes_of[name].owned == bytes_of[name].net == tokens * wide * 4
    assert bytes_of["input_layernorm"].owned == tokens * (2 * hidden + 1) * 4
    assert bytes_of["add"].owned == tokens * hidden * 4
    assert bytes_of["add"].net == 0  # it would hold its other input instead
    assert bytes_of["self_attn.add"].net < 0  # rotary: two inputs held for one output


def test_layers_of_one_kind_are_one_kind_and_alternating_ones_are_two() -> None:
    class Block(nn.Module):
        def __init__(self, activation: nn.Module) -> None:
            super().__init__()
            self.linear, self.activation = nn.Linear(4, 4), activation

        def forward(self, x: Tensor) -> Tensor:
            return self.activation(self.linear(x)) * 2 if isinstance(self.activation, nn.SiLU) else self.linear(x).exp()

    model = nn.Sequential(*(Block(nn.SiLU() if index % 2 else nn.GELU()) for index in range(4)))
    found = survey(model, lambda: model(torch.randn(2, 4, requires_grad=True)))
    assert len(found.kinds) == 2
    assert found.kind_of == (0, 1, 0, 1)


def test_torchs_own_encoder_is_understood() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False)
    found = survey(model, lambda: model(torch.randn(2, 4, 8, requires_grad=True)))
    names = [operator.name for operator in found.kinds[0].operators]
    assert {"linear1", "dropout", "linear2", "norm1", "norm2"} <= set(names)
    assert any(operator.random for operator in found.kinds[0].operators)


def test_a_policy_resolves_against_a_real_model() -> None:
    found, _ = surveyed("llama")
    rule = Rule(Pattern(r"mlp\.(act_fn|mul)"), Recompute())
    resolution = resolve(Policy((LayerPolicy(rules=(rule,)),) * 3), found.catalogue)
    chosen = [name for name, decision in resolution.layers[1].decisions.items() if decision == Recompute()]
    assert chosen == ["mlp.act_fn", "mlp.mul"]


def test_packs_are_the_same_in_every_step_and_layer_of_a_kind() -> None:
    def shape(packs: tuple[Pack, ...]) -> list[tuple[Any, ...]]:
        return [(pack.operator, pack.source, pack.owner, pack.shape, pack.dtype) for pack in packs]

    first, _ = surveyed("llama")
    second, _ = surveyed("llama")
    assert shape(first.kinds[0].packs) == shape(second.kinds[0].packs)


def test_the_command_lists_operators_with_bytes(tmp_path: Path) -> None:
    MODELS["llama"]().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    result = CliRunner().invoke(app, ["operators", str(tmp_path), "--sequence", "16", "--json"])
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    (kind,) = printed["kinds"]
    operators = {operator["name"]: operator for operator in kind["operators"]}
    assert operators["mlp.mul"]["owned"] == 16 * 64 * 4
    assert operators["mlp.act_fn"]["aliases"] == ["feed_forward.w1.activation.silu", "mlp.activation_func.silu"]
    assert {"model.norm", "lm_head", "cross_entropy"} <= {operator["name"] for operator in printed["root"]["operators"]}
    assert printed["held"]["total"] == sum(size for place, size in printed["held"].items() if place != "total")
    result = CliRunner().invoke(app, ["operators", str(tmp_path), "--sequence", "16"], env={"COLUMNS": "120"})
    assert "mlp.act_fn" in result.stdout
    assert "no gain" in result.stdout
    assert "also feed_forward.w1.activation.silu, mlp.activation_func.silu" in result.stdout
    assert "LlamaForCausalLM: outside the layers" in result.stdout
    assert "held for backward in all" in result.stdout


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nowhere", "neither a directory"),
        ("missing_package:build", "cannot import"),
        ("torch.nn:Nothing", "no function"),
        ("missing.py:build", "no file"),
        ("collections:OrderedDict", "expected a torch.nn.Module"),
        ("torch.nn:Identity", "return the arguments"),
        ("torch.nn:Linear", "TypeError"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_an_error_in_words(source: str, words: str) -> None:
    result = CliRunner().invoke(app, ["operators", source])
    assert result.exit_code == 1
    assert words in result.stderr

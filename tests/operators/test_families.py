"""Patterns of the MindSpore guides on unmodified models of transformers."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from lowtide import Decision, Keep, Policy, Recompute, Swap, load_policy
from lowtide.operators.families import PARTS, aliases_of
from lowtide.operators.survey import Survey
from lowtide.policy import LayerPolicy, Pattern, Resolution, Rule, resolve
from support.tiny_models import surveyed

EXAMPLES = Path(__file__).parents[2] / "examples" / "yaml"
LLAMAS = ["llama", "qwen2", "qwen3", "mistral"]
GATED = ("mlp.gate_proj", "mlp.up_proj", "mlp.act_fn", "mlp.mul", "mlp.down_proj")


@cache
def known(name: str, layers: int = 3) -> Survey:
    return surveyed(name, layers=layers)[0]


def matched(name: str, pattern: str) -> list[str]:
    """The operators of a model that a pattern decides, in order."""
    found = known(name)
    layer = LayerPolicy(rules=(Rule(Pattern(pattern), Recompute()),))
    return decided(resolve(Policy((layer,) * len(found.kind_of)), found.catalogue), Recompute())


def decided(resolution: Resolution, decision: Decision, layer: int = 0) -> list[str]:
    return [name for name, one in resolution.layers[layer].decisions.items() if one == decision]


def loaded(tmp_path: Path, text: str) -> Policy:
    file = tmp_path / "train.yaml"
    file.write_text(text)
    return load_policy(file)


@pytest.mark.parametrize("name", LLAMAS)
@pytest.mark.parametrize(
    ("pattern", "operators"),
    [
        (r"feed_forward\.mul", ["mlp.mul"]),
        (r"feed_forward\.w1\.activation\.silu", ["mlp.act_fn"]),
        (r"feed_forward\.w3\.matmul", ["mlp.up_proj"]),
        (r"attention\.flash_attention", ["self_attn.scaled_dot_product_attention"]),
        (r".*\.flash_attention", ["self_attn.scaled_dot_product_attention"]),
        (r"attention_norm\.norm", ["input_layernorm"]),
        (r".*\.norm", ["input_layernorm", "post_attention_layernorm"]),
        ("feed_forward", ["mlp.gate_proj", "mlp.act_fn", "mlp.up_proj", "mlp.mul", "mlp.down_proj"]),
        (r"mlp\.activation_func\.silu", ["mlp.act_fn"]),
        (r"mlp\.mul", ["mlp.mul"]),
        (r"self_attention\.core_attention", ["self_attn.scaled_dot_product_attention"]),
        (r"self_attention\.linear_proj\.matmul", ["self_attn.o_proj"]),
        (r"self_attention\.linear_qkv", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
    ],
)
def test_a_pattern_of_the_guides_names_the_operator_of_a_llama(name: str, pattern: str, operators: list[str]) -> None:
    assert matched(name, pattern) == operators


@pytest.mark.parametrize("module", ["attention", "self_attention", "self_attn"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral"])
def test_the_attention_module_of_either_vocabulary_is_the_whole_attention(name: str, module: str) -> None:
    operators = [operator.name for operator in known(name).kinds[0].operators]
    assert matched(name, module) == [operator for operator in operators if operator.startswith("self_attn.")]


@pytest.mark.parametrize(
    ("name", "pattern", "operators"),
    [
        ("gpt2", r"attention\.flash_attention", ["attn.scaled_dot_product_attention"]),
        ("gpt2", r"mlp\.activation_func\.gelu", ["mlp.act"]),
        ("gpt2", r"self_attention\.linear_proj\.matmul", ["attn.c_proj"]),
        ("gpt2", "feed_forward", ["mlp.c_fc", "mlp.act", "mlp.c_proj", "mlp.dropout"]),
        ("mixtral", r"attention\.flash_attention", ["self_attn.scaled_dot_product_attention"]),
        ("mixtral", r"mlp\.router", ["mlp.gate"]),
        ("qwen3_moe", r"mlp\.experts\.activation_func\.silu", ["mlp.experts.act_fn"]),
        ("qwen3_moe", r"self_attention\.q_layernorm\.norm", ["self_attn.q_norm"]),
        ("qwen2_moe", r"mlp\.shared_experts\.mul", ["mlp.shared_expert.mul"]),
        ("qwen2_moe", r"mlp\.shared_experts\.activation_func\.silu", ["mlp.shared_expert.act_fn"]),
    ],
)
def test_other_families_have_the_names_that_make_sense(name: str, pattern: str, operators: list[str]) -> None:
    assert matched(name, pattern) == operators


LEGACY = "model: {model_config: {num_layers: 3}}\nrecompute_config: {select_recompute: True}\n"


@pytest.mark.parametrize("head", ["", "use_legacy: False\n"], ids=["legacy", "mcore"])
@pytest.mark.parametrize("name", LLAMAS)
def test_select_recompute_means_the_activation_and_the_product_of_a_llama(name: str, head: str, tmp_path: Path) -> None:
    resolution = resolve(loaded(tmp_path, head + LEGACY), known(name).catalogue)
    for layer in range(3):
        assert decided(resolution, Recompute(), layer) == ["mlp.act_fn", "mlp.mul"]


def test_the_swap_example_of_the_guides_swaps_and_recomputes_a_llama() -> None:
    policy = load_policy(EXAMPLES / "llama_swap.yaml")
    found = known("llama", layers=4)
    resolution = resolve(policy, found.catalogue)
    operators = [operator.name for operator in found.kinds[0].operators]
    attention = [name for name in operators if name.startswith("self_attn.")]
    feed_forward = [name for name in operators if name.startswith("mlp.")]
    assert decided(resolution, Recompute(), 0) == decided(resolution, Recompute(), 3) == feed_forward
    assert decided(resolution, Swap(20), 0) == decided(resolution, Swap(20), 1) == attention
    assert decided(resolution, Swap(10), 3) == attention
    assert decided(resolution, Swap(15), 1) == decided(resolution, Swap(15), 2) == feed_forward
    assert not resolution.unused


def test_the_default_swap_is_the_attention_kernel(tmp_path: Path) -> None:
    policy = loaded(tmp_path, "model: {model_config: {num_layers: 3}}\nswap_config: {swap: True}\n")
    resolution = resolve(policy, known("llama").catalogue)
    assert decided(resolution, Swap(1)) == ["self_attn.scaled_dot_product_attention"]
    assert len(decided(resolution, Keep())) == len(resolution.layers[0].decisions) - 1


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.marks[0])
def test_every_mark_of_a_part_has_a_name_of_its_own_in_the_guides(part: object) -> None:
    marks = part.marks  # type: ignore[attr-defined]
    aliases = aliases_of(marks)
    for mark in marks:
        assert aliases[mark], mark
        assert mark not in aliases[mark]


def test_a_layer_of_no_known_family_has_no_aliases() -> None:
    assert aliases_of(["linear1", "dropout", "mlp.gate_proj"]) == {"linear1": (), "dropout": (), "mlp.gate_proj": ()}
    assert aliases_of(GATED)["mlp.mul"] == ("feed_forward.mul",)

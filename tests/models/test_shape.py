"""The shape of a model is read from both layouts, and what is missing is named."""

from __future__ import annotations

import pytest
import torch

from lowtide.config.check import check_text
from lowtide.errors import ConfigError
from lowtide.models.build import build_model
from lowtide.models.shape import DecoderShape, LatentShape, shape_of

GRAPH = """
model:
  model_config:
    {sizes}
"""
FLAT = """
training: {{steps: 1, local_batch_size: 1}}
parallelism: {{tensor_parallel: 1}}
model:
    {sizes}
"""
SIZES = "vocab_size: 100\n    hidden_size: 48\n    num_layers: 2\n    num_attention_heads: 4\n    "


def shape(text: str) -> DecoderShape:
    check = check_text(text)
    check.raise_errors()
    assert check.settings is not None
    return shape_of(check.settings)


@pytest.mark.parametrize("layout", [GRAPH, FLAT], ids=["graph", "2026"])
def test_a_few_sizes_make_a_llama(layout: str) -> None:
    found = shape(layout.format(sizes=SIZES + "seq_length: 128"))
    assert found == DecoderShape(
        vocab_size=100, hidden_size=48, num_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=12,
        intermediate_size=256, max_position_embeddings=128,
    )  # fmt: skip


@pytest.mark.parametrize("layout", [GRAPH, FLAT], ids=["graph", "2026"])
def test_every_size_that_is_missing_is_named(layout: str) -> None:
    with pytest.raises(ConfigError, match=r"has no vocab_size, num_attention_heads"):
        shape(layout.format(sizes="hidden_size: 48\n    num_layers: 2"))


@pytest.mark.parametrize(
    ("hidden", "more", "width"),
    [(4096, "multiple_of: 256", 11008), (8192, "multiple_of: 4096\n    ffn_dim_multiplier: 1.3", 28672)],
    ids=["Llama 2 7B", "Llama 2 70B"],
)
def test_the_inner_width_is_llamas_own(hidden: int, more: str, width: int) -> None:
    sizes = SIZES.replace("hidden_size: 48", f"hidden_size: {hidden}") + more
    assert shape(GRAPH.format(sizes=sizes)).intermediate_size == width


DEEPSEEK = (
    SIZES
    + """kv_lora_rank: 16
    q_lora_rank: 24
    qk_nope_head_dim: 8
    qk_rope_head_dim: 4
    v_head_dim: 8
    n_routed_experts: 8
    num_experts_per_tok: 2
    n_shared_experts: 1
    moe_intermediate_size: 32
    first_k_dense_replace: 1
    n_group: 4
    topk_group: 2
    scoring_func: sigmoid
    norm_topk_prob: True
    routed_scaling_factor: 2.5
    moe_router_load_balancing_type: seq_aux_loss
    moe_aux_loss_coeff: 0.0001
    moe_router_enable_expert_bias: True
    moe_router_bias_update_rate: 0.002
    use_gmm: True"""
)


@pytest.mark.parametrize("layout", [GRAPH, FLAT], ids=["graph", "2026"])
def test_latent_attention_and_experts_are_read(layout: str) -> None:
    found = shape(layout.format(sizes=DEEPSEEK))
    assert found.latent == LatentShape(
        q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
    )
    assert found.experts is not None
    assert (found.experts.count, found.experts.chosen, found.experts.shared, found.experts.first_dense) == (8, 2, 1, 1)
    assert (found.experts.scoring, found.experts.normalised, found.experts.scaling) == ("sigmoid", True, 2.5)
    assert (found.experts.auxiliary, found.experts.balancing) == (0.0001, "seq_aux_loss")
    assert (found.experts.bias, found.experts.bias_rate, found.experts.capacity) == (True, 0.002, None)
    assert [found.is_dense(layer) for layer in range(2)] == [True, False]
    assert build_model(found)(torch.zeros(1, 4, dtype=torch.int64)).shape == (1, 4, 100)


def test_the_older_section_of_experts_is_read_and_drops_unless_the_product_is_grouped() -> None:
    section = "moe_config: {expert_num: 4, num_experts_chosen: 2, capacity_factor: 1.5, moe_intermediate_size: 32"
    dropping = shape(GRAPH.format(sizes=SIZES) + section + "}").experts
    grouped = shape(GRAPH.format(sizes=SIZES) + section + ", use_gmm: True}").experts
    assert dropping is not None
    assert grouped is not None
    assert (dropping.count, dropping.chosen, dropping.capacity, dropping.auxiliary) == (4, 2, 1.5, 0.05)
    assert grouped.capacity is None
    assert grouped.grouped


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ("num_key_value_heads: 3", "must divide"),
        ("kv_lora_rank: 16", "qk_nope_head_dim, qk_rope_head_dim, v_head_dim"),
        ("hidden_act: gelu", "silu"),
        ("position_embedding_type: alibi", "rope and yarn"),
        ("n_routed_experts: 4\n    num_experts_per_tok: 5\n    moe_intermediate_size: 8", "5 of 4 experts"),
        ("n_routed_experts: 4\n    num_experts_per_tok: 2", "moe_intermediate_size"),
        ("n_routed_experts: 4\n    moe_intermediate_size: 8\n    scoring_func: tanh", "softmax or sigmoid"),
        ("n_routed_experts: 4\n    moe_intermediate_size: 8\n    n_group: 3", "does not divide"),
        (
            "n_routed_experts: 4\n    moe_intermediate_size: 8\n    moe_router_load_balancing_type: sinkhorn",
            "seq_aux_loss",
        ),
    ],
)
def test_what_cannot_be_built_says_so(sizes: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shape(GRAPH.format(sizes=SIZES + sizes))

"""DeepSeek's layers: the numbers of transformers' own, the names of the mcore table, and every decision exact."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lowtide import LayerPolicy, Limits, Pattern, Policy, Recompute, Rule, Swap, verify
from lowtide._torch_private.fake import FakeTensorMode
from lowtide.errors import ModelError
from lowtide.models.auxiliary import set_auxiliary_scale
from lowtide.models.build import build_model
from lowtide.models.initialise import initialise
from lowtide.models.prediction import prediction_loss
from lowtide.models.router import reset_expert_counts, routers_of
from lowtide.operators.survey import survey
from lowtide.policy import resolve
from models.shapes import LENGTH, built, deepseek, loss_of, tokens

NAMES = {
    "embedding": "model.embed_tokens", "head": "lm_head", "layers": "model.layers",
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attention.linear_q_down_proj": "self_attn.q_a_proj", "attention.q_layernorm": "self_attn.q_a_layernorm",
    "attention.linear_q_up_proj": "self_attn.q_b_proj", "attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_layernorm": "self_attn.kv_a_layernorm", "attention.linear_kv_up_proj": "self_attn.kv_b_proj",
    "attention.linear_proj": "self_attn.o_proj", "feed_forward.router.weight": "mlp.gate.weight",
    "feed_forward.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "feed_forward.shared_experts": "mlp.shared_experts", "feed_forward": "mlp",
    ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj.",
}  # fmt: skip


def theirs(name: str) -> str:
    if name == "norm.weight":
        return "model.norm.weight"
    for ours, other in NAMES.items():
        name = name.replace(ours, other)
    return name


@pytest.mark.parametrize("rank", [16, None], ids=["compressed queries", "plain queries"])
def test_it_computes_what_transformers_computes(rank: int | None) -> None:
    transformers = pytest.importorskip("transformers")
    shape = deepseek(rms_norm_eps=1e-6)  # its norms inside attention know no other
    assert shape.latent is not None
    shape = dataclasses.replace(shape, latent=dataclasses.replace(shape.latent, q_lora_rank=rank))
    model = built(shape)
    config = transformers.DeepseekV3Config(
        vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, rms_norm_eps=1e-6, rope_theta=10000.0, max_position_embeddings=LENGTH,
        rope_interleave=False,
        q_lora_rank=rank, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, n_routed_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=16, n_shared_experts=1, first_k_dense_replace=1, n_group=4,
        topk_group=2, norm_topk_prob=True, routed_scaling_factor=1.5,
    )  # fmt: skip
    other = transformers.DeepseekV3ForCausalLM(config)
    values: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if ".feed_forward.experts." not in name:
            values[theirs(name).replace("q_b_proj", "q_b_proj" if rank else "q_proj")] = value
    for number in (1, 2):
        own: Any = model.layers[str(number)].feed_forward
        gate_up = torch.cat((own.experts.w1.weight, own.experts.w3.weight), 1).detach()
        values[f"model.layers.{number}.mlp.experts.gate_up_proj"] = gate_up
        values[f"model.layers.{number}.mlp.experts.down_proj"] = own.experts.w2.weight.detach()
    other.load_state_dict(values)
    torch.testing.assert_close(model(tokens()), other(tokens()).logits, rtol=1e-4, atol=1e-5)


def matched(pattern: str, layer: int = 1) -> list[str]:
    model, batch = built(deepseek()), tokens()
    found = survey(model, lambda: model(batch))
    policy = Policy((LayerPolicy(rules=(Rule(Pattern(pattern), Recompute()),)),) * 3)
    decisions = resolve(policy, found.catalogue).layers[layer].decisions
    return [name for name, decision in decisions.items() if decision == Recompute()]


@pytest.mark.parametrize(
    ("pattern", "operators"),
    [
        (r"self_attention\.linear_q_down_proj\.matmul", ["attention.linear_q_down_proj"]),
        (r"self_attention\.linear_kv_up_proj\.matmul", ["attention.linear_kv_up_proj"]),
        (r"self_attention\.kv_layernorm\.norm", ["attention.kv_layernorm"]),
        (r"self_attention\.core_attention\.bmm", ["attention.scaled_dot_product_attention"]),
        (r"self_attention\.flash_attention", ["attention.scaled_dot_product_attention"]),
        (r"attention\.flash_attention", ["attention.scaled_dot_product_attention"]),
        (r"self_attention\.linear_proj\.matmul", ["attention.linear_proj"]),
        (r"mlp\.router", ["feed_forward.router"]),
        (r"mlp\.experts\.activation_func\.silu", ["feed_forward.experts.silu"]),
        (r"mlp\.experts\.linear_fc2\.matmul", ["feed_forward.experts.w2"]),
        (r"mlp\.shared_experts\.mul", ["feed_forward.shared_experts.mul"]),
        (r"mlp\.shared_experts\.activation_func\.silu", ["feed_forward.shared_experts.silu"]),
        (r"feed_forward\.shared_experts\.w3\.matmul", ["feed_forward.shared_experts.w3"]),
        (r"mlp\.token_dispatcher\.permute", ["feed_forward.dispatch"]),
        (r"input_layernorm\.norm", ["attention_norm"]),
    ],
)
def test_a_pattern_of_the_mcore_table_names_the_operator(pattern: str, operators: list[str]) -> None:
    assert matched(pattern) == operators


def test_a_dense_layer_before_those_with_experts_has_the_dense_names() -> None:
    assert matched(r"mlp\.mul", layer=0) == ["feed_forward.mul"]
    assert matched(r"mlp\.mul", layer=1) == []


EVERYTHING = Pattern(".*", "path")
POLICIES: dict[str, tuple[LayerPolicy, ...]] = {
    "recompute": (LayerPolicy(rules=(Rule(EVERYTHING, Recompute()),)),) * 3,
    "swap": (LayerPolicy(Swap(3), boundary=Swap(2)),) * 3,
    "mixed": (
        LayerPolicy(rules=(Rule(Pattern(r"mlp\.mul"), Recompute()),)),
        LayerPolicy(
            rules=(
                Rule(Pattern(r"mlp\.router"), Recompute()),
                Rule(Pattern(r"mlp\.experts\.mul"), Recompute()),
                Rule(Pattern(r"mlp\.token_dispatcher\.permute"), Recompute()),
                Rule(Pattern(r"mlp\.experts\.linear_fc1"), Swap(4)),
            )
        ),
        LayerPolicy(Recompute()),
    ),
}


@pytest.mark.parametrize(
    "experts",
    [{}, {"capacity": 0.6}, {"scoring": "softmax", "bias": False, "z_loss": 0.01, "grouped": False}],
    ids=["all slots", "capacity", "softmax"],
)
@pytest.mark.parametrize("name", POLICIES)
def test_every_decision_is_exact(name: str, experts: dict[str, Any]) -> None:
    model, batch = built(deepseek(experts=experts)), tokens()

    def loss(logits: Tensor) -> Tensor:
        return loss_of(logits, batch)

    done = verify(model, Policy(POLICIES[name], origin="solver"), batch, loss=loss, limits=Limits(minimum_bytes=1))
    assert sum(one.recomputes + one.swaps for one in done.receipt.operators) > 0


@pytest.mark.parametrize("name", POLICIES)
def test_every_decision_is_exact_with_the_grouped_product(name: str) -> None:
    model, batch = built(deepseek()), tokens()

    def loss(logits: Tensor) -> Tensor:
        return loss_of(logits, batch)

    policy = Policy(POLICIES[name], origin="solver")
    with torch.autocast("cpu", torch.bfloat16):  # where the grouped product is the faster one
        verify(model, policy, batch, loss=loss, limits=Limits(minimum_bytes=1))


def test_prediction_layers_predict_the_tokens_after_the_next_and_reach_the_gradient() -> None:
    shape = deepseek(prediction_layers=2, prediction_factor=0.5, experts={"auxiliary": 0.0})
    model, batch = built(shape), tokens()
    assert model.predictions is not None
    assert model.embedding is not None
    assert model.head is not None
    model.train()
    hidden = model.embedding(batch)
    for layer in model.layers.values():
        hidden = layer(hidden, model.rotary)
    losses = []
    for depth, (number, layer) in enumerate(model.predictions.layers.items(), 1):
        own: Any = model.predictions.inputs[number]
        embedded = own.embedding_norm(model.embedding(batch[:, depth:]))
        hidden = layer(own.projection(torch.cat((own.hidden_norm(hidden[:, :-1]), embedded), -1)), model.rotary)
        logits = model.head(own.norm(hidden))
        losses.append(functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, depth + 1 :].flatten()))
    expected = 0.5 * sum(losses) / 2
    set_auxiliary_scale(model, 0.25)
    loss = loss_of(model(batch), batch)
    torch.testing.assert_close(prediction_loss(model), expected.detach())
    loss.backward()
    found = {name: one.grad.clone() for name, one in model.named_parameters()}
    assert list(routers_of(model)) == [1, 2, 3, 4]
    model.zero_grad()
    set_auxiliary_scale(model, 0.0)
    loss_of(model(batch), batch).backward()
    (projection,) = torch.autograd.grad(expected, [model.predictions.inputs["3"].projection.weight])
    torch.testing.assert_close(found["predictions.inputs.3.projection.weight"], 0.25 * projection, rtol=1e-4, atol=1e-7)
    assert not torch.allclose(found["embedding.weight"], model.embedding.weight.grad, rtol=1e-3, atol=0)
    model.eval()
    reset_expert_counts(model)
    model(batch)
    assert prediction_loss(model) is None


def test_every_decision_is_exact_with_prediction_layers() -> None:
    model, batch = built(deepseek(prediction_layers=1)), tokens()
    policy = Policy(POLICIES["mixed"], origin="solver")
    verify(model, policy, batch, layers="layers", loss=lambda logits: loss_of(logits, batch))


def test_a_last_stage_predicts_with_an_embedding_of_its_own_and_needs_the_tokens() -> None:
    shape, batch = deepseek(prediction_layers=1), tokens()
    first, last = build_model(shape, layers=[0], last=False), build_model(shape, layers=[1, 2], first=False)
    assert first.predictions is None
    whole = build_model(shape)
    for part in (first, last, whole):
        initialise(part, seed=1)
    assert torch.equal(first.embedding.weight, last.embedding.weight)
    hidden = first(batch)
    assert torch.equal(last(hidden, tokens=batch), whole(batch))
    with pytest.raises(ModelError, match="give them as tokens="):
        last(hidden)


def test_it_can_be_traced_without_computing_anything() -> None:
    # In bfloat16: torch's grouped product knows no other type where there are no values.
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        model = build_model(deepseek())
        batch = torch.zeros(2, LENGTH, dtype=torch.int64)
        loss_of(model(batch), batch).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())

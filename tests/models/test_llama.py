"""The Llama: the numbers of transformers' own, the names of the guides, and every decision exact."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowtide import Decision, LayerPolicy, Limits, Pattern, Policy, Recompute, Rule, Swap, apply, verify
from lowtide.errors import ModelError
from lowtide.models.build import build_model
from lowtide.models.hugging_face import hugging_face_name
from lowtide.models.shape import YarnShape
from lowtide.operators.survey import survey
from lowtide.policy import resolve
from models.shapes import LENGTH, built, llama, loss_of, tokens


@pytest.mark.parametrize("fused", [True, False], ids=["one attention call", "attention in parts"])
def test_it_computes_what_transformers_computes(fused: bool) -> None:
    transformers = pytest.importorskip("transformers")
    model = built(llama(flash_attention=fused))
    config = transformers.LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, rms_norm_eps=1e-5, rope_theta=10000.0, max_position_embeddings=LENGTH,
    )  # fmt: skip
    other = transformers.LlamaForCausalLM(config)
    other.load_state_dict({hugging_face_name(name): value for name, value in model.state_dict().items()})
    torch.testing.assert_close(model(tokens()), other(tokens()).logits, rtol=1e-4, atol=1e-6)


def test_a_token_sees_only_those_before_it_and_positions_count() -> None:
    model, batch = built(llama()), tokens(1)
    before = model(batch)
    changed = batch.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 48
    after = model(changed)
    assert torch.equal(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8:], after[:, 8:])
    running = torch.arange(LENGTH).expand(1, -1)
    torch.testing.assert_close(model(batch, running), before)
    assert not torch.allclose(model(batch, running // 2), before)


def test_stages_one_after_another_are_the_whole() -> None:
    model, batch = built(llama()), tokens()
    first = build_model(llama(), layers=[0], last=False)
    second = build_model(llama(), layers=[1, 2], first=False)
    for stage in (first, second):
        missing = stage.load_state_dict(model.state_dict(), strict=False).missing_keys
        assert not missing
    assert torch.equal(second(first(batch)), model(batch))


def test_yarn_leaves_fast_dimensions_and_stretches_slow_ones() -> None:
    yarn = YarnShape(factor=4, training_length=64, beta_fast=8, beta_slow=1, mscale=1, mscale_all_dim=1)
    plain, stretched = build_model(llama(head_dim=16)).rotary, build_model(llama(head_dim=16, yarn=yarn)).rotary
    torch.testing.assert_close(stretched[..., 0], plain[..., 0])
    angle = torch.atan2(plain[1, -1, 7], plain[0, -1, 7])
    torch.testing.assert_close(torch.atan2(stretched[1, -1, 7], stretched[0, -1, 7]), angle / 4)


def test_a_sequence_longer_than_the_positions_is_refused() -> None:
    with pytest.raises(ModelError, match="17 tokens and the model positions for 16"):
        built(llama())(torch.zeros(1, 17, dtype=torch.int64))


def test_dropout_is_applied_in_training_only() -> None:
    for changes in ({"hidden_dropout": 0.5}, {"attention_dropout": 0.5}):
        model, batch = built(llama(**changes)), tokens()
        torch.manual_seed(0)
        first, second = model(batch), model(batch)
        assert not torch.equal(first, second)
        model.eval()
        assert torch.equal(model(batch), model(batch))


def matched(pattern: str, **changes: object) -> list[str]:
    model, batch = built(llama(**changes)), tokens()
    found = survey(model, lambda: model(batch))
    policy = Policy((LayerPolicy(rules=(Rule(Pattern(pattern), Recompute()),)),) * 3)
    decisions = resolve(policy, found.catalogue).layers[0].decisions
    return [name for name, decision in decisions.items() if decision == Recompute()]


ATTENTION = [
    "attention.wq", "attention.wk", "attention.wv", "attention.apply_rotary_emb",
    "attention.scaled_dot_product_attention", "attention.wo",
]  # fmt: skip
GATED = ["feed_forward.w1", "feed_forward.w3", "feed_forward.silu", "feed_forward.mul", "feed_forward.w2"]


@pytest.mark.parametrize(
    ("pattern", "operators"),
    [
        (r"feed_forward\.mul", ["feed_forward.mul"]),
        (r"feed_forward\.w1\.activation\.silu", ["feed_forward.silu"]),
        (r"attention\.flash_attention", ["attention.scaled_dot_product_attention"]),
        (r".*\.flash_attention", ["attention.scaled_dot_product_attention"]),
        (r"attention_norm\.norm", ["attention_norm"]),
        (r"ffn_norm\.norm", ["ffn_norm"]),
        (r".*\.norm", ["attention_norm", "ffn_norm"]),
        (r"feed_forward\.w1\.matmul", ["feed_forward.w1"]),
        (r"feed_forward\.w3\.matmul", ["feed_forward.w3"]),
        (r"feed_forward\.w2\.matmul", ["feed_forward.w2"]),
        (r"attention\.wq\.matmul", ["attention.wq"]),
        (r"attention\.wk\.matmul", ["attention.wk"]),
        (r"attention\.wv\.matmul", ["attention.wv"]),
        (r"attention\.wo\.matmul", ["attention.wo"]),
        (r"attention\.apply_rotary_emb\.mul", ["attention.apply_rotary_emb"]),
        ("feed_forward", GATED),
        ("attention", ATTENTION),
        (r"mlp\.mul", ["feed_forward.mul"]),
        (r"mlp\.activation_func\.silu", ["feed_forward.silu"]),
        (r"mlp\.linear_fc1\.matmul", ["feed_forward.w1", "feed_forward.w3"]),
        (r"self_attention\.linear_qkv\.matmul", ["attention.wq", "attention.wk", "attention.wv"]),
        (r"self_attention\.core_attention\.bmm", ["attention.scaled_dot_product_attention"]),
        (r"self_attention\.flash_attention", ["attention.scaled_dot_product_attention"]),
        (r"input_layernorm\.norm", ["attention_norm"]),
        (r"pre_mlp_layernorm\.norm", ["ffn_norm"]),
        ("mlp", GATED),
        ("self_attention", ATTENTION),
    ],
)
def test_a_pattern_of_the_guides_names_the_operator(pattern: str, operators: list[str]) -> None:
    assert matched(pattern) == operators


@pytest.mark.parametrize(
    ("pattern", "operator"),
    [
        (r"attention\.softmax", "attention.softmax"),
        (r"attention\.batch_matmul_q_k", "attention.matmul"),
        (r"attention\.batch_matmul", "attention.matmul_1"),
    ],
)
def test_attention_in_parts_has_the_names_of_its_parts(pattern: str, operator: str) -> None:
    assert matched(pattern, flash_attention=False) == [operator]


POLICIES: dict[str, tuple[LayerPolicy, ...]] = {
    "recompute": (LayerPolicy(rules=(Rule(Pattern(".*", "path"), Recompute()),)),) * 3,
    "swap": (LayerPolicy(Swap(3), boundary=Swap(2)),) * 3,
    "mixed": (
        LayerPolicy(Recompute()),
        LayerPolicy(
            rules=(
                Rule(Pattern(r"feed_forward\.mul"), Recompute()),
                Rule(Pattern(r"feed_forward\.w1\.activation\.silu"), Recompute()),
                Rule(Pattern(r"attention\.flash_attention"), Swap(1)),
                Rule(Pattern(r"attention_norm\.norm"), Recompute()),
            )
        ),
        LayerPolicy(Swap(20)),
    ),
}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", POLICIES)
def test_every_decision_is_exact(name: str, dropout: float) -> None:
    model, batch = built(llama(hidden_dropout=dropout, attention_dropout=dropout, qk_norm=True)), tokens()

    def loss(logits: Tensor) -> Tensor:
        return loss_of(logits, batch)

    done = verify(model, Policy(POLICIES[name], origin="solver"), batch, loss=loss, limits=Limits(minimum_bytes=1))
    assert sum(one.recomputes + one.swaps for one in done.receipt.operators) > 0


@pytest.mark.parametrize("decision", [Recompute(), Swap(2)], ids=str)
def test_the_receipt_names_the_bytes_of_the_product(decision: Decision) -> None:
    model, batch = built(llama()), tokens()
    policy = Policy((LayerPolicy(rules=(Rule(Pattern(r"feed_forward\.mul"), decision),)),) * 3)
    handle = apply(model, policy, limits=Limits(minimum_bytes=1))
    for _ in range(2):
        handle.receipt()
        loss_of(model(batch), batch).backward()
    (setting,) = handle.receipt().settings
    assert setting.operators == ("feed_forward.mul",)
    assert setting.freed_bytes == 3 * batch.numel() * 64 * 4
    handle.remove()

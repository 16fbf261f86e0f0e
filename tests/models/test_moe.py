"""Experts: loop and grouped forms equal, slots dropped as asked, losses that reach the gradient, load that balances."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lowtide.errors import ModelError
from lowtide.models.auxiliary import set_auxiliary_scale
from lowtide.models.experts_shape import ExpertsShape
from lowtide.models.grouped import GroupedLinear, grouped_product, loop_product
from lowtide.models.moe import MixtureOfExperts
from lowtide.models.router import (
    auxiliary_losses,
    expert_fractions,
    reset_expert_counts,
    update_expert_bias,
)
from models import layouts
from models.shapes import built, deepseek, loss_of, tokens
from support.ranks import Ranks

WIDTH = 12


def experts(**changes: Any) -> ExpertsShape:
    sizes: dict[str, Any] = {"count": 4, "chosen": 2, "intermediate_size": 10, "normalised": True}
    return ExpertsShape(**{**sizes, **changes})


def mixture(**changes: Any) -> MixtureOfExperts:
    torch.manual_seed(3)
    return MixtureOfExperts(experts(**changes), WIDTH)


def hidden(batch: int = 2, *, seed: int = 0) -> Tensor:
    return torch.randn(batch, 8, WIDTH, generator=torch.Generator().manual_seed(seed))


def by_hand(module: MixtureOfExperts, rows: Tensor, kept: Tensor | None = None) -> Tensor:
    """The same, token by token and expert by expert; ``kept`` says which slots are not dropped."""
    shape = module.shape
    flat = rows.flatten(0, 1)
    logits = flat @ module.router.weight.t()
    scores = logits.softmax(-1) if shape.scoring == "softmax" else logits.sigmoid()
    chosen = scores.topk(shape.chosen, -1).indices
    output = torch.zeros_like(flat)
    for token in range(len(flat)):
        weights = scores[token, chosen[token]]
        weights = weights / weights.sum() if shape.normalised else weights
        for choice, expert in enumerate(chosen[token].tolist()):
            if kept is not None and not kept[token, choice]:
                continue
            w1, w3, w2 = (one.weight[expert] for one in (module.experts.w1, module.experts.w3, module.experts.w2))
            answer = w2 @ (functional.silu(w1 @ flat[token]) * (w3 @ flat[token]))
            output[token] = output[token] + shape.scaling * weights[choice] * answer
    return output.view(rows.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(16, 24), (12, 10), (13, 7)], ids=["aligned", "even", "odd"])
def test_loop_and_grouped_products_are_equal(dtype: torch.dtype, inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    counts = torch.tensor([5, 0, 7, 0, 1])
    made = []
    start = torch.randn(13, inputs, dtype=dtype), torch.randn(5, outputs, inputs, dtype=dtype)
    towards = torch.randn(13, outputs, dtype=dtype)
    for product in (grouped_product, loop_product):
        rows, weight = (one.clone().requires_grad_() for one in start)
        output = product(rows, weight, counts)
        output.backward(towards)
        made.append((output.detach(), rows.grad, weight.grad))
    exact = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for one, other in zip(*made, strict=True):
        torch.testing.assert_close(one, other, **exact)
    assert made[1][2] is not None
    assert (made[1][2][1] == 0).all()  # an expert without tokens has a gradient, and it is zero


def test_under_autocast_experts_compute_in_its_type_and_without_it_types_must_agree() -> None:
    layer, counts = GroupedLinear(2, 8, 8, grouped=None), torch.tensor([1, 2])
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.ones(3, 8), counts).dtype == torch.bfloat16
    with pytest.raises(ModelError, match="float32 and gets tokens of"):
        layer(torch.ones(3, 8, dtype=torch.bfloat16), counts)


def assert_same_with_gradients(found: Tensor, expected: Tensor, parameters: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad(found.square().sum(), parameters),
        torch.autograd.grad(expected.square().sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"scoring": "sigmoid", "scaling": 2.5}, {"normalised": False, "chosen": 1}])
def test_it_is_what_it_says_token_by_token(changes: dict[str, Any]) -> None:
    module, rows = mixture(**changes), hidden().requires_grad_()
    found, expected = module(rows), by_hand(module, rows)
    assert_same_with_gradients(found, expected, [rows, *module.parameters()])


@pytest.mark.parametrize("policy", ["position", "probs"])
def test_slots_beyond_capacity_are_dropped(policy: str) -> None:
    module, rows = mixture(capacity=0.5, drop_policy=policy), hidden().requires_grad_()
    weights, chosen = module.router(rows)
    capacity = 16 * 2 // 4 // 2
    kept = torch.zeros_like(chosen, dtype=torch.bool)
    for expert in range(4):
        slots = (chosen == expert).nonzero().tolist()
        if policy == "probs":
            slots.sort(key=lambda slot: -weights[slot[0], slot[1]].item())
        for token, choice in slots[:capacity]:
            kept[token, choice] = True
    assert 0 < kept.sum() < kept.numel()
    found, expected = module(rows), by_hand(module, rows, kept)
    assert_same_with_gradients(found, expected, [rows, *module.parameters()])


def test_a_capacity_for_everything_drops_nothing() -> None:
    module, roomy = mixture(), mixture(capacity=4.0)
    assert torch.equal(module(hidden()), roomy(hidden()))


def test_experts_are_chosen_from_the_best_groups_only() -> None:
    router = mixture(count=8, chosen=2, groups=4, chosen_groups=1).router
    scores = (hidden() @ router.weight.t()).softmax(-1)
    best = scores.unflatten(-1, (4, 2)).amax(-1).argmax(-1).flatten()
    chosen = router(hidden()).experts
    assert (chosen // 2 == best.unsqueeze(-1)).all()
    assert (chosen.sort(-1).values[:, 0] != chosen.sort(-1).values[:, 1]).all()


def test_the_losses_of_the_router_reach_its_gradient_with_the_scale_that_is_set() -> None:
    def gradient(scale: float, **changes: Any) -> Tensor:
        module = mixture(**changes)
        set_auxiliary_scale(module, scale)
        module(hidden()).square().sum().backward()
        assert module.router.weight.grad is not None
        return module.router.weight.grad

    for changes in ({"auxiliary": 0.1}, {"auxiliary": 0.1, "balancing": "seq_aux_loss"}, {"z_loss": 0.1}):
        router = mixture(**changes).router
        logits = hidden() @ router.weight.t()
        share = logits.softmax(-1)
        chosen = functional.one_hot(share.topk(2, -1).indices, 4).sum(-2).float()
        if "z_loss" in changes:
            loss = 0.1 * logits.logsumexp(-1).square().mean()
        elif "balancing" in changes:
            loss = 0.1 * 4 * (chosen.mean(1) / 2 * share.mean(1)).sum(-1).mean()
        else:
            loss = 0.1 * 4 * (chosen.mean((0, 1)) / 2 * share.mean((0, 1))).sum()
        loss.backward()
        module = mixture(**changes)
        module(hidden())
        torch.testing.assert_close(auxiliary_losses(module)[0], loss.detach())
        for scale in (1.0, 0.25):
            extra = gradient(scale, **changes) - gradient(0.0, **changes)
            torch.testing.assert_close(extra, router.weight.grad * scale, rtol=1e-3, atol=1e-5)


def test_the_scale_may_be_set_between_forward_and_backward() -> None:
    made = []
    for late in (False, True):
        module = mixture(auxiliary=0.1)
        set_auxiliary_scale(module, 1.0 if late else 0.5)
        loss = module(hidden()).sum()
        set_auxiliary_scale(module, 0.5)
        loss.backward()
        made.append(module.router.weight.grad)
    assert torch.equal(made[0], made[1])


def test_a_loss_over_sequences_is_the_same_in_one_batch_and_in_two() -> None:
    whole, parts = mixture(auxiliary=0.1, balancing="seq_aux_loss"), mixture(auxiliary=0.1, balancing="seq_aux_loss")
    whole(hidden(4))
    for part in hidden(4).split(2):
        parts(part)
    torch.testing.assert_close(auxiliary_losses(parts)[0] / 2, auxiliary_losses(whole)[0])
    assert torch.equal(expert_fractions(parts)[0], expert_fractions(whole)[0])


def test_fractions_are_of_the_slots_since_the_last_reset() -> None:
    module = mixture()
    module(hidden())
    module(hidden(seed=1))
    chosen = torch.cat([module.router(hidden(seed=seed)).experts for seed in (0, 1)])
    reset_expert_counts(module)
    assert expert_fractions(module) == {}
    module(hidden())
    module(hidden(seed=1))
    expected = torch.bincount(chosen.flatten(), minlength=4) / chosen.numel()
    assert torch.equal(expert_fractions(module)[0], expected)
    module.eval()
    module(hidden(seed=2))
    assert torch.equal(expert_fractions(module)[0], expected)  # evaluation is not counted


def test_the_bias_moves_against_the_load_and_evens_it() -> None:
    module = mixture(bias=True, bias_rate=0.01, scoring="sigmoid", chosen=1)
    with torch.no_grad():
        module.router.weight.mul_(10)
        module.router.weight[0] += 0.1  # the first expert is the favourite
    spread = []
    for _ in range(60):
        reset_expert_counts(module)
        module(hidden(8) + 0.5)
        fractions = expert_fractions(module)[0]
        before = module.router.expert_bias.clone()
        update_expert_bias(module)
        moved = module.router.expert_bias - before
        torch.testing.assert_close(moved, 0.01 * (fractions.mean() - fractions).sign(), atol=1e-6, rtol=0)
        spread.append(fractions.max() - fractions.min())
    assert sum(spread[-10:]) / 10 < spread[0] / 2


def test_routers_are_known_by_the_number_of_their_layer_and_recomputing_counts_nothing_twice() -> None:
    from lowtide import LayerPolicy, Policy, Recompute, apply

    model, batch = built(deepseek()), tokens()
    handle = apply(model, Policy((LayerPolicy(Recompute()),) * 3))
    loss_of(model(batch), batch).backward()
    handle.remove()
    fractions = expert_fractions(model)
    assert list(fractions) == [1, 2]
    assert model.layers["1"].feed_forward.router.counts.sum() == batch.numel() * 2
    assert list(auxiliary_losses(model)) == [1, 2]


@pytest.mark.parametrize("decision", ["keep", "recompute operators", "recompute layers", "swap"])
def test_experts_on_two_ranks_are_those_of_one_process(decision: str, four_ranks: Ranks) -> None:
    model = built(deepseek(), seed=5)
    batch = tokens(2, seed=1)
    loss = loss_of(model(batch), batch)
    loss.backward()
    expected = dict(model.named_parameters())
    answers = four_ranks.run(layouts.expert_parallel, decision)
    mean = torch.stack([answer["loss"] for answer in answers[:2]]).mean()
    torch.testing.assert_close(mean, loss.detach(), rtol=1e-6, atol=1e-6)
    for answer in answers:
        for name, parameter in expected.items():
            torch.testing.assert_close(answer[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def trained(batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model = built(deepseek(), seed=5)
    loss = loss_of(model(batch), batch)
    loss.backward()
    return loss.detach(), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    return [name for name, one in expected.items() if not torch.allclose(found[name], one, rtol=1e-4, atol=1e-6)]


def test_latent_attention_and_shared_experts_can_be_tensor_parallel(four_ranks: Ranks) -> None:
    loss, expected = trained(tokens(2, seed=1))
    for found in four_ranks.run(layouts.latent_tensor_parallel):
        torch.testing.assert_close(found["loss"], loss, rtol=1e-6, atol=1e-6)
        assert differing(found, expected) == []


def test_expert_parallel_experts_can_be_sharded_further(four_ranks: Ranks) -> None:
    loss, expected = trained(tokens(4, seed=1))
    answers = four_ranks.run(layouts.experts_in_fsdp)
    torch.testing.assert_close(torch.stack([one["loss"] for one in answers]).mean(), loss, rtol=1e-6, atol=1e-6)
    for found in answers:
        assert differing(found, expected) == []

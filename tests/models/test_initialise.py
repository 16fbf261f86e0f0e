"""Fresh weights are the same in every layout, bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowtide.models.build import build_model
from lowtide.models.initialise import initialise
from models import layouts
from models.shapes import built, llama, loss_of, tokens
from support.ranks import Ranks


@pytest.mark.parametrize("layout", ["fsdp", "tp", "tp in fsdp"])
def test_every_layout_gets_the_values_of_one_process(layout: str, four_ranks: Ranks) -> None:
    model = built(llama(vocab_size=50, intermediate_size=72), seed=5)
    expected = dict(model.named_parameters()) | {"rotary": model.rotary}
    for found in four_ranks.run(layouts.parameters, layout):
        assert found.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_experts_and_columns_of_a_weight_are_filled_where_they_are(four_ranks: Ranks) -> None:
    module = nn.Module()
    module.weight, module.columns = nn.Parameter(torch.empty(6, 5, 7)), nn.Parameter(torch.empty(3000, 7))
    initialise(module, seed=5)
    for found in four_ranks.run(layouts.experts_in_parts):
        assert torch.equal(found["weight"], module.weight)
        assert torch.equal(found["columns"], module.columns)


@pytest.mark.parametrize("layout", ["tp", "tp in fsdp"])
def test_tensor_parallel_plans_apply_to_the_llama_as_it_is(layout: str, four_ranks: Ranks) -> None:
    model, batch = built(llama(), seed=5), tokens()
    loss = loss_of(model(batch), batch)
    loss.backward()
    for found in four_ranks.run(layouts.gradients, layout):
        torch.testing.assert_close(found["loss"], loss.detach(), rtol=1e-6, atol=1e-6)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_a_stage_has_the_values_of_its_layers() -> None:
    whole, stage = built(llama(), seed=5), build_model(llama(), layers=[1, 2], first=False)
    initialise(stage, seed=5)
    expected = dict(whole.named_parameters())
    assert [name for name in expected if name.startswith(("layers.1", "layers.2", "norm", "head"))] == [
        name for name, _ in stage.named_parameters()
    ]
    for name, parameter in stage.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_weights_are_normal_and_depend_on_seed_and_name_and_block() -> None:
    module = nn.Module()
    module.one, module.other = nn.Parameter(torch.empty(3000, 64)), nn.Parameter(torch.empty(3000, 64))
    initialise(module, seed=0)
    first, second, third = module.one.detach().clone().split(1024)
    assert abs(module.one.std().item() - 0.02) < 2e-4
    assert abs(module.one.mean().item()) < 2e-4
    assert not torch.equal(first, second)
    assert not torch.equal(third, first[: len(third)])
    assert not torch.equal(module.one, module.other)
    initialise(module, seed=1)
    assert not torch.equal(module.one[:1024], first)


def test_norms_are_one_and_biases_zero_and_tied_weights_stay_tied_through_meta() -> None:
    shape = llama(qkv_bias=True, qk_norm=True, tie_word_embeddings=True)
    with torch.device("meta"):
        model = build_model(shape)
    model.to_empty(device="cpu")
    initialise(model, seed=0)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all(), name
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
    assert model.head is not None
    assert model.embedding is not None
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.rotary, build_model(shape).rotary)

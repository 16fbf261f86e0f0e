"""What runs outside the layers, and that every saved byte is counted exactly once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.operators.survey import Survey, survey
from support.tiny_models import surveyed, tiny

FAMILIES = ["llama", "gpt2", "mixtral", "qwen2_moe"]


def saved_bytes(name: str, *, autocast: bool) -> int:
    """All that autograd saves in one run of the same model, measured without lowtide."""
    model, storages = tiny(name), {}
    tokens = torch.randint(3, 64, (2, 8))

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()  # held: no address is used again
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), hooks:
        model(tokens, labels=tokens)
    return sum(storage.nbytes() for storage in storages.values())


def names(found: Survey) -> list[str]:
    return [operator.name for operator in found.root.operators]


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_saved_byte_is_counted_exactly_once(name: str, autocast: bool) -> None:
    found, _ = surveyed(name, autocast=autocast)
    assert found.held.total == saved_bytes(name, autocast=autocast)
    kinds = [found.kinds[kind] for kind in found.kind_of]
    assert found.held.layers == sum(operator.owned for kind in kinds for operator in kind.operators)
    assert found.held.boundaries == sum(kind.boundary for kind in kinds) + found.root.boundary + found.root.root
    assert found.held.root == sum(operator.owned for operator in found.root.operators)
    assert found.held.static == sum(kind.static for kind in kinds) + found.root.static
    assert found.held.kept == sum(kind.kept for kind in kinds) + found.root.kept


def test_operators_of_the_root_have_their_path_in_the_whole_model() -> None:
    found, _ = surveyed("llama")
    assert {"model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head", "cross_entropy"} <= set(names(found))
    assert not any("layers" in name for name in names(found))
    owned = {operator.name: operator.owned for operator in found.root.operators}
    tokens, hidden, vocabulary = 16, 32, 64
    assert owned["model.norm"] == tokens * (2 * hidden + 1) * 4
    assert owned["cross_entropy"] == (tokens * vocabulary + 1) * 4


def test_what_the_root_made_and_a_layer_saved_is_the_roots() -> None:
    found, _ = surveyed("llama")
    (rotary,) = [operator for operator in found.root.operators if operator.name == "model.rotary_emb"]
    assert rotary.owned == found.kinds[0].root > 0
    assert rotary.net == rotary.owned - 64  # the positions; the embedding is the first layer's input, held anyway


def test_what_is_computed_outside_the_model_does_not_count() -> None:
    model = tiny("llama")
    tokens = torch.randint(3, 64, (2, 8))
    found = survey(model, lambda: model(tokens).logits.exp().sin().sum())
    assert "lm_head" in names(found)
    assert not {"exp", "sin", "sum", "cross_entropy"} & set(names(found))


class Exponent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).exp()  # saves its own output, which is the next layer's input


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Exponent() for _ in range(3))
        self.broken = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).sin()
        for block in self.blocks:
            x = block(x)
        if self.broken:
            raise RuntimeError("broken")
        return x.cos()


def test_a_last_value_that_its_layer_saved_too_is_counted_once() -> None:
    model = Model()
    found = survey(model, lambda: model(torch.randn(2, 4, requires_grad=True)))
    size = 2 * 4 * 4
    # The input, the linear's output for sin, the four values between the parts; the exponents own what they saved.
    assert found.held.total - found.held.static == 6 * size
    assert found.held.boundaries == 5 * size
    assert names(found) == ["first", "sin", "cos"]


def test_a_model_that_runs_twice_is_known_by_its_last_run() -> None:
    model = Model()
    x = torch.randn(2, 4, requires_grad=True)
    once, twice = survey(model, lambda: model(x)), survey(model, lambda: [model(x), model(x)])
    assert once.held == twice.held
    assert once.root.operators == twice.root.operators


def test_the_model_is_restored_even_after_an_error() -> None:
    def hooks(model: nn.Module) -> list[Any]:
        return [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()]

    model = Model()
    before = hooks(model)
    for broken in (False, True):
        model.broken = broken
        x = torch.randn(2, 4, requires_grad=True)
        if broken:
            with pytest.raises(RuntimeError, match="broken"):
                survey(model, lambda: model(x))  # noqa: B023
        else:
            survey(model, lambda: model(x))  # noqa: B023
        assert hooks(model) == before
        assert torch.overrides._get_current_function_mode_stack() == []
        torch.ones(2, requires_grad=True).exp().sum().backward()  # no mode and no hook is left

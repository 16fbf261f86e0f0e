"""A layer is learnt while it runs, and a run that fails or asks for little teaches nothing wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lowtide.errors import PolicyError, UnmatchedError
from lowtide.policy import LayerPolicy, Pattern, Policy, Recompute, Rule, Swap
from lowtide.runtime.apply import apply
from lowtide.runtime.limits import Limits
from support.garbage import collect_garbage
from support.stacks import ROWS, WIDTH, Stack, gated, lines, same, swap, train
from tide.testing import fresh_tide  # noqa: F401


class ModelFailsError(Exception):
    """What a model may raise."""


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_first_run_that_raises_teaches_nothing(failing: int) -> None:
    calls = 0

    def body(layer: Any, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        hidden = layer.up(layer.norm(x))
        if calls == failing:
            raise ModelFailsError
        return x + layer.down(functional.silu(hidden))

    model = Stack(body, 3)
    handle = apply(model, Policy((swap("silu"),) * 3), limits=Limits(minimum_bytes=1))
    with pytest.raises(ModelFailsError):
        model(torch.randn(ROWS, WIDTH))
    for _ in range(2):
        model(torch.randn(ROWS, WIDTH)).sum().backward()
    assert [bool(line.swaps) for line in lines(handle, "silu")] == [True] * 3


@pytest.mark.parametrize("frozen", [0, 1])
def test_after_frozen_embeddings_only_the_first_two_layers_keep_everything(frozen: int) -> None:
    """The first layer's input has no gradient, so it saves less than the others: they have a profile of their own."""

    def body(layer: Any, x: Tensor) -> Tensor:
        return x + layer.down(functional.silu(layer.up(x)))

    model = Stack(body, 5)
    for layer in model.layers[:frozen]:
        layer.requires_grad_(False)
    handle = apply(model, Policy((swap("silu"),) * 5), limits=Limits(minimum_bytes=1))
    own = model(torch.randn(ROWS, WIDTH)).sum()
    said = handle.receipt()
    assert {one.layer for one in said.operators if one.swaps} == set(range(frozen + 2, 5))
    assert f"layers {frozen}-{frozen + 1} kept everything" in str(said)
    own.backward()
    model(torch.randn(ROWS, WIDTH)).sum().backward()
    said = handle.receipt()
    assert {one.layer for one in said.operators if one.swaps} == set(range(frozen, 5))
    assert "kept everything" not in str(said)


def test_an_unmatched_pattern_leaves_no_mode_behind() -> None:
    model = Stack(gated, 2)
    apply(model, Policy((swap("sillu"),) * 2))
    with pytest.raises(UnmatchedError):
        model(torch.randn(ROWS, WIDTH))
    assert torch.overrides._get_current_function_mode_stack() == []


def test_a_refusal_under_compilation_leaves_no_mode_behind() -> None:
    model = Stack(gated, 2)
    apply(model, Policy((swap("silu"),) * 2))
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(PolicyError, match=r"inside torch\.compile"):
        compiled(torch.randn(ROWS, WIDTH))
    assert torch.overrides._get_current_function_mode_stack() == []


def test_the_input_of_layers_that_are_all_recomputed_is_swapped() -> None:
    expected = train(gated, None)
    found = train(gated, LayerPolicy(Recompute(), boundary=Swap(1)))
    assert same(expected.values, found.values)
    assert [line.swaps for line in lines(found.attached, "input")] == [2, 3, 3]


def test_a_pattern_is_checked_where_all_layers_are_recomputed() -> None:
    model = Stack(gated, 2)
    apply(model, Policy((LayerPolicy(Recompute(), (Rule(Pattern("sillu"), Swap(1)),)),) * 2))
    with pytest.raises(UnmatchedError, match="silu"):
        model(torch.randn(ROWS, WIDTH))


@pytest.mark.parametrize("policy", [swap("silu", prefetch=1000), swap("silu"), swap("down"), LayerPolicy(Swap(1000))])
def test_a_graph_that_is_never_run_ends_though_operators_save_their_own_outputs(policy: LayerPolicy) -> None:
    """The first run, in which layers are learnt, as well as the later ones."""
    torch.manual_seed(0)
    model = Stack(gated, 3).to("tide")
    apply(model, Policy((policy,) * 3), limits=Limits(minimum_bytes=1))
    x = torch.randn(ROWS, WIDTH, device="tide")
    before = torch.accelerator.memory_allocated()
    for _ in range(3):
        model(x).sum()
        collect_garbage()
        assert torch.accelerator.memory_allocated() == before


class Mixed(nn.Module):
    """Layers of one class, of which the first has another block than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(dense) for dense in (True, False, False))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    class Layer(nn.Module):
        def __init__(self, dense: bool) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.act = nn.SiLU() if dense else nn.Sigmoid()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.act(self.up(x)) if isinstance(self.act, nn.SiLU) else self.up(x).tanh())


def test_layers_of_one_class_with_other_modules_are_kinds_of_their_own() -> None:
    model = Mixed()
    handle = apply(model, Policy((swap("act"), swap("tanh"), swap("tanh"))), limits=Limits(minimum_bytes=1))
    for _ in range(2):
        model(torch.randn(ROWS, WIDTH)).sum().backward()
    assert len(handle.profiles) == 2
    assert {line.layer for line in lines(handle, "tanh") if line.swaps} == {1, 2}


def test_in_a_part_of_a_model_a_pattern_may_match_nothing() -> None:
    model = Stack(gated, 2)
    handle = apply(model, Policy((swap("tanh"),) * 2), allow_unmatched=True)
    model(torch.randn(ROWS, WIDTH)).sum().backward()
    assert [one.setting for one in handle.unused] == ["tanh"]
    assert "tanh" in str(handle.receipt().without_effect)

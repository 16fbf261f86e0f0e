"""The bytes that recompute saves are exactly the arithmetic, measured by the device's allocator."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import tide
from lowtide.operators.kinds import LayerKind
from lowtide.policy import LayerPolicy, Pattern, Policy, Recompute, Rule
from lowtide.runtime.apply import apply

LAYERS = 3
# Widths such that every tensor is a multiple of the allocator's 512 bytes.
SMALL: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _device() -> Any:
    tide.reset()
    tide.configure(preset="h100")
    yield
    assert not tide.races()
    tide.reset()


def step(policy: LayerPolicy | None, autocast: bool) -> tuple[int, list[Tensor], LayerKind | None]:
    """The bytes held after a forward, the gradients, and the kind of layer that was learnt."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SMALL)).train().to("tide")
    handle = apply(model, Policy((policy,) * LAYERS)) if policy is not None else None
    tokens = torch.randint(3, 128, (4, 64)).to("tide")
    held = 0
    for _ in range(2):  # the first step learns
        model.zero_grad()
        before = torch.accelerator.memory_allocated()
        with torch.autocast("tide", torch.bfloat16, enabled=autocast):
            loss = model(tokens, labels=tokens).loss
        held = torch.accelerator.memory_allocated() - before
        loss.backward()
    gradients = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
    kind = next(iter(handle.kinds.values())) if handle is not None and handle.kinds else None
    del model, handle, loss
    gc.collect()
    return held, gradients, kind


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_recomputing_one_operator_saves_exactly_its_net_bytes(autocast: bool) -> None:
    expected, gradients, _ = step(None, autocast)
    _, _, kind = step(LayerPolicy(rules=(Rule(Pattern("mlp.mul"), Recompute()),)), autocast)
    assert kind is not None
    holding = [operator for operator in kind.operators if operator.owned]
    assert len(holding) == 11
    for operator in holding:
        rule = Rule(Pattern(operator.name), Recompute())
        held, found, _ = step(LayerPolicy(rules=(rule,)), autocast)
        assert expected - held == LAYERS * operator.net, operator.name
        assert all(torch.equal(a, b) for a, b in zip(gradients, found, strict=True)), operator.name


def test_the_default_selection_saves_exactly_what_it_owns() -> None:
    expected, gradients, _ = step(None, False)
    names = ("mlp.act_fn", "mlp.mul")
    held, found, kind = step(LayerPolicy(rules=tuple(Rule(Pattern(name), Recompute()) for name in names)), False)
    assert kind is not None
    owned = sum(operator.owned for operator in kind.operators if operator.name in names)
    assert expected - held == LAYERS * owned
    assert all(torch.equal(a, b) for a, b in zip(gradients, found, strict=True))


def test_a_recomputed_layer_holds_its_input_only() -> None:
    _, gradients, _ = step(None, False)
    held, found, _ = step(LayerPolicy(Recompute()), False)
    kept, _, kind = step(LayerPolicy(rules=(Rule(Pattern("mlp.mul"), Recompute()),)), False)
    assert kind is not None
    owned = sum(operator.owned for operator in kind.operators)
    saved = {operator.name: operator.owned for operator in kind.operators}["mlp.mul"]
    # torch's own checkpoint holds one small block more
    assert 0 <= LAYERS * (owned - saved) - (kept - held) <= 512
    assert all(torch.equal(a, b) for a, b in zip(gradients, found, strict=True))


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_nothing_is_left_after_backward(autocast: bool) -> None:
    everything = LayerPolicy(rules=(Rule(Pattern(".*", "path"), Recompute()),))
    for policy in (None, everything, LayerPolicy(Recompute())):
        before = torch.accelerator.memory_allocated()
        step(policy, autocast)
        gc.collect()
        assert torch.accelerator.memory_allocated() == before

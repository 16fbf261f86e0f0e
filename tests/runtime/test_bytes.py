"""The bytes that recompute and swap free are exactly the arithmetic, measured by the device's allocator."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import tide
from lowtide.operators.kinds import LayerKind
from lowtide.policy import LayerPolicy, Pattern, Policy, Recompute, Rule, Swap
from lowtide.runtime.apply import apply
from lowtide.runtime.limits import Limits
from lowtide.runtime.receipt import Receipt
from support.garbage import collect_garbage

LAYERS = 3
SMALL: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _device() -> Any:
    tide.configure(preset="h100")
    yield
    assert not tide.races()


MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
}


@cache
def made(name: str) -> Any:
    """A model on the device; each step leaves it as it was."""
    torch.manual_seed(0)
    # the other implementations of experts need an integer histogram, or add up in any order
    experts = {"experts_implementation": "eager"} if name == "mixtral" else {}
    return transformers.AutoModelForCausalLM.from_config(MODELS[name](), **experts).train().to("tide")


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_left() -> Any:
    yield
    made.cache_clear()  # other tests of this process want the device's memory
    collect_garbage()


def requested() -> int:
    """The bytes that are allocated, before the allocator rounds them up."""
    return int(torch.accelerator.memory_stats()["requested_bytes.all.current"])


def step(
    policy: LayerPolicy | None, autocast: bool, name: str = "llama", *, others: LayerPolicy | None = None
) -> tuple[int, list[Tensor], LayerKind | None, Receipt | None]:
    """The bytes held after a forward, the gradients, the kind of layer that was learnt, and the receipt."""
    model = made(name)
    limits = Limits(minimum_bytes=0)
    layers = (policy, *(others or policy,) * (LAYERS - 1)) if policy is not None else ()
    handle = apply(model, Policy(layers), limits=limits) if policy is not None else None
    tokens = torch.arange(3, 67).view(2, 32).to("tide")
    held = 0
    for _ in range(2):  # the first step learns
        model.zero_grad()
        before = requested()
        with torch.autocast("tide", torch.bfloat16, enabled=autocast):
            loss = model(tokens, labels=tokens).loss
        held = requested() - before
        loss.backward()
    gradients = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
    kind = next(iter(handle.profiles.values())) if handle is not None and handle.profiles else None
    receipt = handle.receipt() if handle is not None else None
    if handle is not None:
        handle.remove()
    model.zero_grad()
    del handle, loss
    collect_garbage()
    return held, gradients, kind, receipt


def pattern_of(name: str) -> Pattern:
    return Pattern(name.replace(".", r"\.").replace("[*]", r"\[\*\]"))


CASES = [
    # Experts have many operators.
    pytest.param(name, autocast, marks=[pytest.mark.slow] if autocast or name == "mixtral" else [])
    for name in MODELS
    for autocast in (False, True)
]


@pytest.mark.parametrize(("name", "autocast"), CASES, ids=lambda value: {True: "autocast", False: "fp32"}.get(value))
def test_one_operator_alone_frees_exactly_its_bytes(name: str, autocast: bool) -> None:
    """Swapped: what it owns. Recomputed: its net bytes; where those are no gain, the receipt says so.

    In one layer of several, since every layer of a mixture of experts routes in its own way.
    """
    expected, gradients, _, _ = step(None, autocast, name)
    _, _, kind, _ = step(LayerPolicy(Swap(1)), autocast, name)
    assert kind is not None
    holding = [operator for operator in kind.operators if operator.owned]
    assert len(holding) >= 11
    for operator in holding:
        pattern = pattern_of(operator.name)
        swap = LayerPolicy(rules=(Rule(pattern, Swap(1)),))
        held, found, _, receipt = step(swap, autocast, name, others=LayerPolicy())
        assert expected - held == operator.owned, operator.name
        assert all(torch.equal(a, b) for a, b in zip(gradients, found, strict=True)), operator.name
        assert receipt is not None
        assert receipt.settings[0].moved_bytes == operator.owned, "the first of two steps learns"
        recompute = LayerPolicy(rules=(Rule(pattern, Recompute()),))
        held, found, _, receipt = step(recompute, autocast, name, others=LayerPolicy())
        net = operator.net if operator.repeatable else 0
        assert expected - held == net, operator.name
        assert all(torch.equal(a, b) for a, b in zip(gradients, found, strict=True)), operator.name
        assert receipt is not None
        if net <= 0:
            said = [*receipt.settings[0].notes, *receipt.without_effect]
            assert any("no effect" in line or "is kept" in line for line in said), operator.name


@pytest.mark.parametrize("names", [("mlp.act_fn", "mlp.mul"), ("mlp.act_fn",), ("mlp.mul",)], ids=", ".join)
def test_the_default_selection_saves_exactly_what_it_owns(names: tuple[str, ...]) -> None:
    expected, gradients, _, _ = step(None, False)
    held, found, kind, _ = step(LayerPolicy(rules=tuple(Rule(Pattern(name), Recompute()) for name in names)), False)
    assert kind is not None
    owned = sum(operator.owned for operator in kind.operators if operator.name in names)
    assert expected - held == LAYERS * owned
    assert all(torch.equal(a, b) for a, b in zip(gradients, found, strict=True))


def test_a_recomputed_layer_holds_its_input_only() -> None:
    _, gradients, _, _ = step(None, False)
    held, found, _, _ = step(LayerPolicy(Recompute()), False)
    kept, _, kind, _ = step(LayerPolicy(rules=(Rule(Pattern("mlp.mul"), Recompute()),)), False)
    assert kind is not None
    owned = sum(operator.owned for operator in kind.operators)
    saved = {operator.name: operator.owned for operator in kind.operators}["mlp.mul"]
    # torch's own checkpoint holds one small block more
    assert 0 <= LAYERS * (owned - saved) - (kept - held) <= 512
    assert all(torch.equal(a, b) for a, b in zip(gradients, found, strict=True))


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_nothing_is_left_after_backward(autocast: bool) -> None:
    everything = LayerPolicy(rules=(Rule(Pattern(".*", "path"), Recompute()),))
    swapped = LayerPolicy(Swap(3), boundary=Swap(2))
    for policy in (None, everything, LayerPolicy(Recompute()), swapped, LayerPolicy(Swap(5, "disk"))):
        made("llama")
        before = torch.accelerator.memory_allocated()
        step(policy, autocast)
        collect_garbage()
        assert torch.accelerator.memory_allocated() == before


def test_nothing_is_left_after_backward_where_autocast_is_around_it_too() -> None:
    """A pipeline's step is in one autocast context: what autocast caches there lives until the step ends."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = torch.nn.LayerNorm(64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))

    def left(policy: LayerPolicy | None) -> int:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(Block() for _ in range(LAYERS))).to("tide")
        handle = apply(model, Policy((policy,) * LAYERS), limits=Limits(minimum_bytes=0)) if policy else None
        x = torch.randn(256, 64).to("tide")
        with torch.autocast("tide", torch.bfloat16):
            for _ in range(2):  # the first step learns
                model(x).float().sum().backward()
            collect_garbage()
            before = requested()
            model(x).float().sum().backward()
            found = requested() - before
        if handle is not None:
            handle.remove()
        return found

    recomputed = LayerPolicy(rules=(Rule(Pattern("norm"), Recompute()), Rule(Pattern("up"), Recompute())))
    swapped = LayerPolicy(rules=(Rule(Pattern("norm"), Swap(1)), Rule(Pattern("up"), Recompute())))
    assert left(None) == left(recomputed) == left(swapped)

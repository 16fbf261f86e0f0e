"""Recompute without hooks, from the graph that a module has made: exact whatever the module does from step to step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional

from lowtide._torch_private.saved_tensor_hooks import top_saved_tensors_hooks
from lowtide.policy import LayerPolicy, Pattern, Policy, Recompute, Rule
from lowtide.runtime.apply import Handle, apply
from lowtide.runtime.layer import DecidedLayer
from lowtide.runtime.run import Run


class Gated(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.body, self.step = body, 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return self.body(self, x)


class Layer(nn.Module):
    """A layer one half of which is a function; ``step`` lets it change from step to step."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), Gated(body)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def model_of(body: Callable[[Any, Tensor], Tensor]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(body) for _ in range(2)))


def recompute(*names: str) -> Policy:
    return Policy((LayerPolicy(rules=tuple(Rule(Pattern(f"mlp.{name}"), Recompute()) for name in names)),) * 2)


def batch(step: int) -> Tensor:
    return torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, steps: int = 6) -> list[Tensor]:
    found: list[Tensor] = []
    for step in range(steps):
        model.zero_grad()
        loss = model(batch(step)).square().sum()
        loss.backward()
        found += [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]
    return found


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def grafted(handle: Handle) -> list[bool]:
    decided = [follower.decided for follower in handle.followers]
    return [isinstance(one, DecidedLayer) and one.graft is not None for one in decided]


def gated(self: Gated, x: Tensor) -> Tensor:
    return self.down(functional.silu(self.gate(x)) * self.up(x))


def flat(self: Gated, x: Tensor) -> Tensor:
    return gated(self, x.view(-1, 8)).view(x.shape)


def twice(self: Gated, x: Tensor) -> Tensor:
    product = functional.gelu(self.gate(x), approximate="tanh") * self.up(x)
    return self.down(product) + functional.linear(product.view(-1, 16), self.down.weight).view(x.shape)


def one_argument_twice(self: Gated, x: Tensor) -> Tensor:
    act = functional.silu(self.gate(x))
    return self.down(act * act)


NAMES = {"gated": ("silu", "mul"), "flat": ("silu", "mul"), "twice": ("gelu", "mul"), "one_argument_twice": ("mul",)}
BODIES = {body.__name__: body for body in (gated, flat, twice, one_argument_twice)}


@pytest.mark.parametrize("name", BODIES)
def test_a_module_is_recomputed_without_hooks_once_its_graph_is_known(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    pack = Run.pack
    monkeypatch.setattr(Run, "pack", lambda self, tensor: asked.append(0) or pack(self, tensor))
    expected = train(model_of(BODIES[name]))
    model = model_of(BODIES[name])
    handle = apply(model, recompute(*NAMES[name]))
    found = train(model, 2)
    assert grafted(handle) == [True, True]
    handle.receipt()
    asked.clear()
    again = model_of(BODIES[name])
    assert same(expected[: len(found)], found)
    model.load_state_dict(again.state_dict())
    assert same(expected, train(model))
    assert not asked
    counts = {(one.layer, one.operator): one.recomputes for one in handle.receipt().operators}
    assert counts == {(layer, f"mlp.{operator}"): 6 for layer in range(2) for operator in NAMES[name]}
    handle.remove()
    assert same(expected, train(model))


def test_what_is_recomputed_is_free_when_the_module_has_run() -> None:
    made: list[weakref.ReferenceType[Tensor]] = []

    def body(self: Gated, x: Tensor) -> Tensor:
        act, up = functional.silu(self.gate(x)), self.up(x)
        product = act * up
        made[:] = [weakref.ref(act), weakref.ref(product), weakref.ref(up)]
        return self.down(product)

    model = model_of(body)
    handle = apply(model, recompute("silu", "mul"))
    train(model, 2)
    gc.disable()
    try:
        loss = model(batch(0)).sum()
        assert grafted(handle) == [True, True]
        assert [reference() is None for reference in made] == [True, True, False]
        del loss  # a graph that is never run ends as well
        assert made[2]() is None
    finally:
        gc.enable()


def written(self: Gated, x: Tensor) -> Tensor:
    act = functional.silu(self.gate(x))
    if self.step == 4:
        with torch.no_grad():
            act.mul_(2.0)  # unseen by the graph: only the count of writes tells
    return self.down(act * self.up(x))


def product_written(self: Gated, x: Tensor) -> Tensor:
    product = functional.silu(self.gate(x)) * self.up(x)
    if self.step >= 4:
        with torch.no_grad():
            product.add_(1.0)
    return self.down(product)


def exchanged(self: Gated, x: Tensor) -> Tensor:
    one, other = functional.silu(self.gate(x)) * self.up(x), functional.silu(self.up(x)) * self.gate(x)
    if self.step >= 4:
        one, other = other, one
    return self.down(one) + other.sum()


def arguments_exchanged(self: Gated, x: Tensor) -> Tensor:
    act, up = functional.silu(self.gate(x)), self.up(x)
    return self.down(act * up if self.step < 4 else up * act)


def another_branch(self: Gated, x: Tensor) -> Tensor:
    out = gated(self, x)
    return out if self.step < 4 else out + gated(self, out)


def another_function(self: Gated, x: Tensor) -> Tensor:
    act = functional.silu if self.step % 3 else torch.sigmoid
    return self.down(act(self.gate(x)) * self.up(x))


def number_that_changes(self: Gated, x: Tensor) -> Tensor:
    return self.down(functional.silu(self.gate(x) * (0.5 * self.step)) * self.up(x))


def frozen_half(self: Gated, x: Tensor) -> Tensor:
    up = self.up(x)
    return self.down(functional.silu(self.gate(x)) * (up if self.step < 4 else up.detach()))


WAYS = [
    written, product_written, exchanged, arguments_exchanged, another_branch, another_function, number_that_changes,
    frozen_half,
]  # fmt: skip


@pytest.mark.parametrize("body", WAYS, ids=lambda body: body.__name__)
def test_a_module_that_takes_another_way_is_exact(body: Callable[[Any, Tensor], Tensor]) -> None:
    expected = train(model_of(body), 9)
    model = model_of(body)
    apply(model, recompute("silu", "mul"))
    assert same(expected, train(model, 9))


def test_another_branch_is_noticed_though_it_leaves_the_known_nodes_where_they_are() -> None:
    def body(self: Gated, x: Tensor) -> Tensor:
        shift = functional.silu(self.up(x)).mean(-1, keepdim=True) if self.step >= 4 else 0.0
        return self.down(functional.silu(self.gate(x + shift)) * self.up(x))

    model = model_of(body)
    handle = apply(model, recompute("silu", "mul"))
    train(model, 3)
    assert [follower.kind for follower in handle.followers] == [None, None]
    train(model, 2)
    kinds = [follower.kind for follower in handle.followers]
    assert all(kind is not None and "mlp.silu_1" in {one.name for one in kind.operators} for kind in kinds)


def test_it_is_not_guessed_which_of_two_arguments_was_saved() -> None:
    """Both factors are views of one product: from the graph alone it could be either."""

    def body(self: Gated, x: Tensor) -> Tensor:
        product = functional.silu(self.gate(x)) * self.up(x)
        return self.down(product @ (product.transpose(1, 2) @ product))

    expected = train(model_of(body))
    model = model_of(body)
    handle = apply(model, recompute("mul"))
    assert same(expected, train(model))
    assert grafted(handle) == [False, False]


def test_hooks_of_others_around_it_are_as_with_hooks_of_ours() -> None:
    expected = train(model_of(gated))
    model = model_of(gated)
    handle = apply(model, recompute("silu", "mul"))
    train(model, 2)
    model.load_state_dict(model_of(gated).state_dict())
    assert grafted(handle) == [True, True]
    with save_on_cpu():
        assert top_saved_tensors_hooks(False) is not None
        found = train(model)
    assert same(expected, found)


def test_backward_twice_and_gradients_of_gradients_are_exact() -> None:
    def gradients(model: nn.Module) -> list[Tensor]:
        x = batch(0).requires_grad_()
        loss = model(x).square().sum()
        (first,) = torch.autograd.grad(loss, x, retain_graph=True)
        (second,) = torch.autograd.grad(loss, x, create_graph=True)
        third = torch.autograd.grad(second.square().sum(), list(model.parameters()), allow_unused=True)
        return [first, second.detach(), *(one for one in third if one is not None)]

    model = model_of(gated)
    expected = gradients(model)
    handle = apply(model, recompute("silu", "mul"))
    train(model, 2)
    assert grafted(handle) == [True, True]
    assert same(expected, gradients(model))


def test_an_argument_that_is_written_to_afterwards_is_refused_as_without_lowtide() -> None:
    kept: list[Tensor] = []

    def body(self: Gated, x: Tensor) -> Tensor:
        up = self.up(x)
        kept.append(up)
        return self.down(functional.silu(self.gate(x)) * up)

    model = model_of(body)
    for applied in (False, True):
        handle = apply(model, recompute("silu", "mul")) if applied else None
        train(model, 3)
        assert handle is None or grafted(handle) == [True, True]
        loss = model(batch(0)).sum()
        with torch.no_grad():
            kept[-1].add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("whose", ["silu", "mul"])
def test_a_value_that_is_written_to_after_it_was_saved_is_refused_as_without_lowtide(whose: str) -> None:
    writing = False

    def body(self: Gated, x: Tensor) -> Tensor:
        act = functional.silu(self.gate(x))
        product = act * self.up(x)
        out = self.down(product)
        if writing:
            with torch.no_grad():
                (act if whose == "silu" else product).add_(1.0)
        return out

    model = model_of(body)
    for applied in (False, True):
        handle = apply(model, recompute("silu", "mul")) if applied else None
        writing = False
        train(model, 3)
        assert handle is None or grafted(handle) == [True, True]
        writing = True
        loss = model(batch(0)).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

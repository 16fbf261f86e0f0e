"""What lowtide promises, one test or more for each promise, named after it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lowtide._torch_private.saved_tensor_hooks import top_saved_tensors_hooks
from lowtide.errors import UnmatchedError
from lowtide.policy import Keep, LayerPolicy, Pattern, Policy, Recompute, Rule, Swap
from lowtide.runtime.apply import apply
from lowtide.runtime.limits import Limits
from support.stacks import ROWS, WIDTH, Stack, gated, lines, recompute, same, swap, train
from tide.testing import fresh_tide  # noqa: F401

ANY = Limits(minimum_bytes=1)
KINDS = {
    "keep": LayerPolicy(),
    "recompute operators": recompute("silu", "mul"),
    "recompute layers": recompute(),
    "recompute layers but one operator": LayerPolicy(Recompute(), (Rule(Pattern("mul"), Keep()),)),
    "swap operators": swap("silu", "mul"),
    "swap layers": swap(),
    "swap to disk": swap(tier="disk"),
    "swap inputs of recomputed layers": LayerPolicy(Recompute(), boundary=Swap(2)),
    "mixed": LayerPolicy(Swap(3), (Rule(Pattern("silu"), Recompute()), Rule(Pattern("mul"), Keep())), Swap(1, "disk")),
}


def batch(device: str = "cpu") -> Tensor:
    return torch.randn(ROWS, WIDTH, device=device)


# 1. Exact


def everything(layer: Any, x: Tensor) -> Tensor:
    """Dropout, routing, views, and a weight used twice."""
    hidden = functional.dropout(functional.silu(layer.up(layer.norm(x))), 0.2)
    order = torch.topk(hidden.detach().sum(-1), x.shape[0]).indices
    mixed = torch.empty_like(hidden).index_put((order,), hidden)[order] * layer.table
    return x + layer.down(mixed) + functional.linear(layer.norm(x), layer.up.weight)[:, : x.shape[1]]


@pytest.mark.parametrize("device", ["cpu", "tide"])
@pytest.mark.parametrize("policy", [swap(), recompute("silu", "dropout", "index_put"), recompute(), swap(tier="disk")])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_exact(policy: LayerPolicy, device: str, autocast: bool) -> None:
    def accumulated(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    def around(number: int) -> Any:
        return torch.autocast(device, torch.bfloat16, enabled=autocast)

    expected = train(everything, None, device=device, backward=accumulated, around=around)
    found = train(everything, policy, device=device, backward=accumulated, around=around)
    assert same(expected.values, found.values)


# 2. Nothing silent


def test_nothing_silent_about_a_pattern_that_matches_nothing() -> None:
    for policy in (swap("sillu"), recompute("sillu")):
        model = Stack(gated, 2)
        apply(model, Policy((policy,) * 2), limits=ANY)
        with pytest.raises(UnmatchedError, match="did you mean silu"):
            model(batch())


def test_nothing_silent_about_a_setting_without_effect() -> None:
    rules = (Rule(Pattern("mul"), Keep()), Rule(Pattern("mul"), Swap(1)), Rule(Pattern("silu"), Recompute()))
    model = Stack(gated, 2)
    handle = apply(model, Policy((LayerPolicy(rules=rules),) * 2), limits=ANY)
    model(batch()).sum().backward()
    assert [(one.setting, one.action) for one in handle.unused] == [("mul", "swap(1)")]


def test_nothing_silent_about_a_swap_that_cannot_happen() -> None:
    for limits in (Limits(minimum_bytes=1, host_bytes=0), Limits(minimum_bytes=1 << 20)):
        trained = train(gated, swap("mul"), limits=limits)
        assert all(line.kept_bytes and line.notes for line in lines(trained.attached, "mul"))


def test_nothing_silent_about_an_operator_that_cannot_be_repeated() -> None:
    def body(layer: Any, x: Tensor) -> Tensor:
        return x + layer.down((layer.up(x) * 0.5).add_(1.0).sin())

    assert train(body, recompute("add")).attached.kept


def test_nothing_silent_about_an_operator_of_which_nothing_is_saved() -> None:
    for policy in (swap("down"), recompute("down")):
        assert "no effect: nothing of it is saved for backward" in str(train(gated, policy).attached.receipt())


# 3. Free when unused


def test_free_when_unused() -> None:
    """A kept layer has no hook, no mode and no wrapper; nor has one between decided ones, once they are known."""
    model = Stack(gated, 3)
    before = snapshot(model)
    with apply(model, Policy((LayerPolicy(),) * 3)):
        assert snapshot(model) == before
    handle = apply(model, Policy((recompute("silu"), LayerPolicy(), recompute("silu"))))
    model(batch()).sum().backward()
    kept = model.layers[1]
    assert "forward" not in vars(kept)
    assert not kept._forward_hooks
    assert not kept._forward_pre_hooks
    handle.remove()
    assert snapshot(model) == before


def test_free_when_unused_stands_between_nobody_and_autograd() -> None:
    """While a layer that keeps everything runs, no hooks are on."""

    def hooked(policy: LayerPolicy) -> bool:
        model, found = Stack(gated, 3), []
        apply(model, Policy((policy,) * 3), limits=ANY)
        model(batch()).sum().backward()
        model.layers[1].up.register_forward_hook(lambda *_: found.append(top_saved_tensors_hooks(False)))
        model(batch()).sum().backward()
        return found != [None]

    assert not hooked(LayerPolicy())
    assert hooked(swap("silu"))


@pytest.mark.parametrize("policy", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("known", [False, True], ids=["at once", "after a step"])
def test_hooks_of_others_see_all_that_is_saved(policy: LayerPolicy, known: bool) -> None:
    """Layers inside them are left to them, and that is said."""

    def seen(policy: LayerPolicy | None) -> list[tuple[int, ...]]:
        model, shapes = Stack(gated, 3), []

        def pack(tensor: Tensor) -> Tensor:
            shapes.append(tuple(tensor.shape))
            return tensor.detach()

        if policy is not None:
            apply(model, Policy((policy,) * 3), limits=ANY)
        if known:
            model(batch()).sum().backward()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(batch()).sum().backward()
        return shapes

    bare = seen(None)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert seen(policy) == bare
    if known and policy != LayerPolicy():
        assert "are left to those" in str(said[0].message)


# 4. Reversible


def snapshot(model: nn.Module) -> Any:
    """All that can be put on a model: its tree, its state, each module's own attributes and hooks."""
    tree = [
        (
            name,
            id(module),
            {key: id(value) for key, value in vars(module).items() if not isinstance(value, dict)},
            {key: list(value) for key, value in vars(module).items() if isinstance(value, dict)},
            module.forward.__func__ if hasattr(module.forward, "__func__") else module.forward,
        )
        for name, module in model.named_modules()
    ]
    return tree, list(model.state_dict()), [id(parameter) for parameter in model.parameters()]


@pytest.mark.parametrize("ran", [0, 1, 3], ids=["at once", "after one step", "after three steps"])
@pytest.mark.parametrize("policy", KINDS.values(), ids=KINDS.keys())
def test_reversible(policy: LayerPolicy, ran: int) -> None:
    model = Stack(gated, 3)
    own = model.layers[1].up.forward
    model.layers[1].up.forward = lambda x: own(x)  # somebody else's wrapper stays
    before = snapshot(model)
    handle = apply(model, Policy((policy,) * 3, origin="solver"), limits=ANY)
    assert list(model.state_dict()) == before[1]
    for _ in range(ran):
        model(batch()).sum().backward()
    handle.remove()
    assert snapshot(model) == before
    handle.remove()  # once more does no harm
    model(batch()).sum().backward()


def test_reversible_at_the_end_of_a_with() -> None:
    model = Stack(gated, 3)
    before = snapshot(model)
    with apply(model, Policy((swap("silu"),) * 3), limits=ANY) as handle:
        model(batch()).sum().backward()
        assert handle.profiles
        assert snapshot(model) != before
    assert snapshot(model) == before


def test_reversible_and_applied_again() -> None:
    expected = train(gated, None, device="cpu")
    trained = train(gated, swap(), device="cpu", steps=1)
    trained.attached.remove()
    for policy in KINDS.values():
        handle = apply(trained.model, Policy((policy,) * 3, origin="solver"), limits=ANY)
        trained.model(batch()).sum().backward()
        handle.remove()
    assert same(expected.values, train(gated, swap(), device="cpu").values)


# 5. Composable


def test_composable_with_a_checkpoint_around_it() -> None:
    def gradients(policy: LayerPolicy | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = Stack(gated, 3)
        if policy is not None:
            apply(model, Policy((policy,) * 3, origin="solver"), limits=ANY)
        torch.manual_seed(1)
        for _ in range(3):
            model.zero_grad()
            checkpoint(model, batch().requires_grad_(), use_reentrant=False).sum().backward()
        return [one.grad for one in model.parameters() if one.grad is not None]

    expected = gradients(None)
    for policy in KINDS.values():
        assert same(expected, gradients(policy)), policy


@pytest.mark.parametrize("policy", KINDS.values(), ids=KINDS.keys())
def test_composable_with_gradients_of_gradients(policy: LayerPolicy) -> None:
    def penalty(policy: LayerPolicy | None) -> list[Tensor]:
        model = train(gated, policy, device="cpu").model
        model.zero_grad()
        torch.manual_seed(3)
        x = batch().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        return [one.grad for one in model.parameters() if one.grad is not None]

    assert same(penalty(None), penalty(policy))


# 6. Bounded


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_bounded(tier: Any) -> None:
    limits = Limits(minimum_bytes=1, host_bytes=50_000, disk_bytes=60_000, in_flight_bytes=20_000)
    expected = train(gated, None)
    found = train(gated, swap(prefetch=4, tier=tier), limits=limits)
    assert same(expected.values, found.values)
    manager = found.attached.manager
    assert manager.pinned_pool.taken <= 50_000
    assert manager._disk is None or manager._disk.end <= 60_000
    assert manager.reloads.bytes == 0
    assert {note for line in lines(found.attached) for note in line.notes}


@pytest.mark.parametrize("place", ["tide", "cpu"])
def test_a_default_device_does_not_move_host_memory(place: str) -> None:
    """Host memory is on the host, wherever factories make tensors."""
    torch.manual_seed(0)
    model = Stack(gated, 3).to(place)
    handle = apply(
        model,
        Policy((LayerPolicy(Recompute(), boundary=Swap(2)),) * 3, origin="solver"),
        limits=Limits(minimum_bytes=1),
    )
    torch.set_default_device("tide")
    try:
        for _ in range(2):
            model(torch.randn(8, 32, device="cpu").to(place)).sum().backward()
    finally:
        torch.set_default_device(None)
    assert sum(line.swaps for line in lines(handle)) > 0
    assert not any("limit" in note for line in lines(handle) for note in line.notes)
    handle.remove()

"""What a user does between forward and backward, or around the model, and a Policy has to come through."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

from lowtide._torch_private.saved_tensor_hooks import top_saved_tensors_hooks
from lowtide.errors import RebuildError
from lowtide.policy import LayerPolicy, Pattern, Policy, Recompute, Rule, Swap
from lowtide.runtime.apply import Handle, apply
from lowtide.runtime.limits import Limits

LAYERS, WIDTH = 2, 16


class Scaled(nn.Module):
    """A leaf with an attribute, which it multiplies by."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale) * x


class Counting(nn.Module):
    """A leaf with a buffer, which it writes into."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return torch.tanh(x - self.mean)


class Noisy(nn.Module):
    """Adds noise of a given generator, or none."""

    generator: torch.Generator | None = None
    on = True

    def forward(self, x: Tensor) -> Tensor:
        if not self.on:
            return torch.sigmoid(x) * x
        return torch.sigmoid(x + torch.randn(x.shape, generator=self.generator)) * x


class Layer(nn.Module):
    def __init__(self, leaf: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.up, self.leaf, self.down = nn.Linear(WIDTH, WIDTH), leaf(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.leaf(self.up(x)))


class Model(nn.Module):
    def __init__(self, leaf: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(leaf) for _ in range(LAYERS))
        self.last = leaf()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.last(x))


def batch(step: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))


LEAF = LayerPolicy(rules=(Rule(Pattern("leaf"), Recompute()),))
UP = LayerPolicy(rules=(Rule(Pattern("up"), Recompute()),))
Steps = Callable[[Model], None]
POLICIES = {
    "layers": Policy((LEAF,) * LAYERS),
    "whole layers": Policy((LayerPolicy(Recompute()),) * LAYERS),
}
in_both = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def run(leaf: Callable[[], nn.Module], steps: Steps, policy: Policy | None) -> tuple[list[Tensor], Handle | None]:
    torch.manual_seed(0)
    model = Model(leaf)
    handle = apply(model, policy, limits=Limits(minimum_bytes=1)) if policy is not None else None
    steps(model)
    assert top_saved_tensors_hooks(False) is None
    return [*(one.grad for one in model.parameters() if one.grad is not None), *model.buffers()], handle


def exact(leaf: Callable[[], nn.Module], steps: Steps, policy: Policy) -> Handle:
    expected, _ = run(leaf, steps, None)
    found, handle = run(leaf, steps, policy)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    assert handle is not None
    return handle


@in_both
def test_the_mode_is_changed_before_backward(policy: Policy) -> None:
    def steps(model: Model) -> None:
        for step in range(3):
            model.train()
            loss = model(batch(step)).sum()
            model.eval()
            loss.backward()

    exact(lambda: nn.Dropout(0.3), steps, policy)


@in_both
def test_an_attribute_is_changed_before_backward(policy: Policy) -> None:
    def steps(model: Model) -> None:
        for step in range(3):
            losses = []
            for scale in (0.5, 2.0):
                for one in model.modules():
                    if isinstance(one, Scaled):
                        one.scale = scale
                losses.append(model(batch(step)).sum())
            for loss in losses:
                loss.backward()

    assert not exact(Scaled, steps, policy).kept


def test_a_leaf_that_writes_into_its_buffer_is_kept_and_that_is_said() -> None:
    def steps(model: Model) -> None:
        for step in range(3):
            model(batch(step)).sum().backward()

    for leaf in (Counting, lambda: nn.BatchNorm1d(WIDTH)):
        handle = exact(leaf, steps, POLICIES["layers"])
        assert handle.kept
        assert "cannot be replayed" in handle.receipt().without_effect[0]


def test_whole_layers_that_write_into_their_buffers() -> None:
    def steps(model: Model) -> None:
        for step in range(4):
            model.train(step != 2)
            losses = [model(batch(step)).sum(), model(batch(step + 5)).sum()]
            for loss in losses:
                loss.backward()

    for leaf in (Counting, lambda: nn.BatchNorm1d(WIDTH), lambda: nn.BatchNorm1d(WIDTH, momentum=None)):
        exact(leaf, steps, Policy((LayerPolicy(Recompute()),) * LAYERS))
        exact(leaf, steps, Policy((LayerPolicy(Recompute(), boundary=Swap(1)),) * LAYERS))


@in_both
def test_noise_of_a_generator(policy: Policy) -> None:
    def steps(model: Model) -> None:
        generator = torch.Generator().manual_seed(3)
        for one in model.modules():
            if isinstance(one, Noisy):
                one.generator = generator
        for step in range(3):
            model(batch(step)).sum().backward()

    exact(Noisy, steps, policy)


@in_both
def test_noise_that_begins_after_the_first_steps(policy: Policy) -> None:
    def steps(model: Model) -> None:
        for step in range(4):
            for one in model.modules():
                if isinstance(one, Noisy):
                    one.on = step > 1
            model(batch(step)).sum().backward()

    exact(Noisy, steps, policy)


@pytest.mark.parametrize("policy", [Policy((UP,) * LAYERS), Policy((LayerPolicy(Swap(2)),) * LAYERS)], ids=str)
def test_parameters_that_are_written_to_before_backward_are_never_used(policy: Policy) -> None:
    def steps(model: Model) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            first, second = model(batch(step)).sum(), model(batch(step + 5)).sum()
            first.backward(retain_graph=True)
            optimizer.step()
            second.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(Scaled, steps, None)
    with pytest.raises(
        (RuntimeError, RebuildError), match=r"modified by an inplace operation|changed in place after it ran"
    ):
        run(Scaled, steps, policy)


def test_parameters_that_are_others_in_forward_are_used_again_in_backward() -> None:
    def steps(model: Model) -> None:
        others = {name: one.detach().clone().requires_grad_() for name, one in model.named_parameters()}
        for step in range(3):
            functional_call(model, others, batch(step)).sum().backward()

    exact(Scaled, steps, Policy((LayerPolicy(Swap(1)),) * LAYERS))
    exact(lambda: nn.Linear(WIDTH, WIDTH), steps, POLICIES["layers"])
    exact(lambda: nn.Linear(WIDTH, WIDTH), steps, Policy((LayerPolicy(Recompute()),) * LAYERS))


def test_what_is_computed_of_a_parameter_is_what_it_was() -> None:
    def steps(model: Model) -> None:
        for step in range(3):
            losses = [model(batch(step)).sum(), model(batch(step + 5)).sum()]
            for loss in losses:
                loss.backward()

    exact(lambda: weight_norm(nn.Linear(WIDTH, WIDTH)), steps, POLICIES["layers"])


@pytest.mark.parametrize("decision", [Recompute(), Swap(1)], ids=str)
def test_conjugates(decision: Any) -> None:
    class Spectrum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            z = torch.fft.fft(x)
            return functional.pad((z * z.conj()).real.sqrt() * z.conj().imag, (0, 0))

    def steps(model: Model) -> None:
        for step in range(3):
            model(batch(step)).sum().backward()

    rules = LayerPolicy(rules=(Rule(Pattern(".*", "path"), decision),))
    exact(lambda: nn.Sequential(Spectrum()), steps, Policy((rules,) * LAYERS))


@in_both
def test_another_thread_evaluates_meanwhile(policy: Policy) -> None:
    def steps(model: Model) -> None:
        model(batch(0)).sum().backward()
        stop = threading.Event()

        def evaluate() -> None:
            with torch.no_grad():
                while not stop.is_set():
                    model(batch(9))

        thread = threading.Thread(target=evaluate)
        thread.start()
        try:
            for step in range(20):
                model(batch(step)).sum().backward()
        finally:
            stop.set()
            thread.join()

    exact(Scaled, steps, policy)


@in_both
def test_an_interrupt_in_a_layer_comes_through(policy: Policy) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def steps(model: Model) -> None:
        for at in (0, 2):
            for step in range(at):
                model(batch(step)).sum().backward()
            hook = model.layers[1].down.register_forward_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(batch(0))
            hook.remove()
        model(batch(1)).sum().backward()

    exact(Scaled, steps, policy)


@in_both
def test_what_others_put_around_a_forward_stays(policy: Policy) -> None:
    """As accelerate does with autocast."""

    def steps(model: Model) -> None:
        for one in (model, model.layers[0]):
            inner = one.forward
            one.forward = lambda x, inner=inner: inner(x) * 2
        for step in range(3):
            model(batch(step)).sum().backward()

    handle = exact(Scaled, steps, policy)
    handle.remove()


def test_a_refusal_of_torch_leaves_nothing_behind() -> None:
    torch.manual_seed(0)
    model = Model(Scaled)
    handle = apply(model, POLICIES["layers"])
    for _ in range(2):
        model(batch(0)).sum().backward()
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(lambda x: model(x).sum())(batch(0))
    handle.receipt()
    model(batch(0)).sum().backward()
    assert any(one.recomputes for one in handle.receipt().operators)

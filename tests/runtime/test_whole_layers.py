"""A layer that is recomputed as a whole: how often it is replayed, where a replay ends, and what is held meanwhile."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import tide
from lowtide.errors import RebuildError
from lowtide.policy import LayerPolicy, Policy, Recompute
from lowtide.runtime.apply import Handle, apply
from support.garbage import collect_garbage

LAYERS, WIDTH = 2, 64
WHOLE = Policy((LayerPolicy(Recompute()),) * LAYERS)


class Block(nn.Module):
    """A residual block around a function that ``body`` may replace."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        return x + self.down(hidden if self.body is None else self.body(self, hidden))


def model(body: Callable[[Any, Tensor], Tensor] | None = None, device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(body) for _ in range(LAYERS))).to(device)


def gradients(one: nn.Module, policy: Policy | None, backward: Callable[[Tensor], object]) -> list[Tensor]:
    handle = apply(one, policy) if policy is not None else None
    torch.manual_seed(1)
    backward(one(torch.randn(8, WIDTH, requires_grad=True)).square().sum())
    if handle is not None:
        handle.remove()
    return [parameter.grad.clone() for parameter in one.parameters() if parameter.grad is not None]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) > 0 and all(map(torch.equal, first, second))


def replays(handle: Handle) -> list[int]:
    return [handle.ledger.line(layer, "the whole layer").recomputes for layer in range(LAYERS)]


def test_each_backward_through_one_graph_replays_a_layer_once() -> None:
    def twice(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    assert same(gradients(model(), None, twice), gradients(model(), WHOLE, twice))
    applied = model()
    handle = apply(applied, WHOLE)
    twice(applied(torch.randn(8, WIDTH)).sum())
    assert replays(handle) == [2, 2]


def test_gradients_of_gradients_are_exact() -> None:
    one = model()

    def penalised(loss: Tensor) -> None:
        found = torch.autograd.grad(loss, list(one.parameters()), create_graph=True)
        sum(gradient.square().sum() for gradient in found).backward()

    assert same(gradients(one, None, penalised), (one.zero_grad(), gradients(one, WHOLE, penalised))[1])


def test_a_replay_ends_when_the_last_tensor_is_saved_again() -> None:
    ran = numpy.zeros(2, int)  # a list would be restored after each replay

    def body(self: Any, hidden: Tensor) -> Tensor:
        ran[0] += 1
        return hidden

    class Tail(Block):
        def forward(self, x: Tensor) -> Tensor:
            output = super().forward(x)
            ran[1] += 1
            return output

    torch.manual_seed(0)
    one = nn.Sequential(*(Tail(body) for _ in range(LAYERS)))
    apply(one, WHOLE)
    loss = one(torch.randn(8, WIDTH)).sum()
    assert ran.tolist() == [LAYERS, LAYERS]
    loss.backward()
    assert ran.tolist() == [2 * LAYERS, LAYERS]


def test_a_model_that_catches_exceptions_does_not_catch_the_end_of_a_replay() -> None:
    fell_back = numpy.zeros(1, int)

    class Careful(Block):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return super().forward(x)
            except Exception:
                fell_back[0] += 1
                return x

    torch.manual_seed(0)
    one = nn.Sequential(*(Careful() for _ in range(LAYERS)))
    apply(one, WHOLE)
    one(torch.randn(8, WIDTH)).sum().backward()
    assert fell_back[0] == 0


def test_a_layer_that_runs_a_backward_of_its_own_is_exact() -> None:
    def body(self: Any, hidden: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = hidden.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.sin(inner * 3.0).sum(), inner)
        return hidden * slope

    assert same(gradients(model(body), None, Tensor.backward), gradients(model(body), WHOLE, Tensor.backward))


def test_a_replay_keeps_nothing_for_a_part_of_the_graph_that_is_gone() -> None:
    remembered: list[weakref.ref[Tensor]] = []

    class Saved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            kept = x * 2.0
            ctx.save_for_backward(kept)
            remembered.append(weakref.ref(kept))
            return kept.sum()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            (kept,) = ctx.saved_tensors
            return gradient * kept

    def body(self: Any, hidden: Tensor) -> Tensor:
        Saved.apply(hidden)  # nothing follows from it
        return hidden

    held: list[int] = []
    one = model(body)
    apply(one, WHOLE)
    loss = one(torch.randn(8, WIDTH)).sum()
    remembered.clear()
    one[-1].up.weight.register_hook(lambda _: held.append(sum(one() is not None for one in remembered)))
    loss.backward()
    assert len(remembered) == LAYERS
    assert held == [0]


def test_a_replay_that_saves_another_number_of_tensors_is_refused() -> None:
    for more in (0, 2):
        times = iter([1, 1, more, more])

        def body(self: Any, hidden: Tensor, times: Iterator[int] = times) -> Tensor:
            for _ in range(next(times)):
                hidden = torch.sin(hidden)
            return hidden

        one = model(body)
        apply(one, WHOLE)
        loss = one(torch.randn(8, WIDTH)).sum()
        with pytest.raises(RebuildError, match="the whole layer of layer 1 cannot be recomputed: "):
            loss.backward()


@pytest.fixture
def on_tide() -> Iterator[None]:
    tide.reset()
    tide.configure(preset="h100")
    yield
    tide.reset()


@pytest.mark.usefixtures("on_tide")
def test_weights_that_autocast_has_cast_stay_while_layers_are_replayed() -> None:
    """Torch's checkpoint throws them away, and so does an autocast inside of a layer that runs on autograd's thread."""

    def body(self: Any, hidden: Tensor) -> Tensor:
        with torch.autocast("tide", enabled=False):
            return hidden.float() * 1.5

    def held(policy: Policy | None) -> int:
        one = model(body, "tide")
        handle = apply(one, policy) if policy is not None else None
        x = torch.randn(8, WIDTH).to("tide")
        with torch.autocast("tide", torch.bfloat16):
            one(x).float().sum().backward()
            collect_garbage()
            after = torch.accelerator.memory_allocated()
            loss = one(x).float().sum()  # finds its weights cast
            loss.backward()
            del loss
            collect_garbage()
            assert torch.accelerator.memory_allocated() == after
        collect_garbage()
        casts = after - torch.accelerator.memory_allocated()
        if handle is not None:
            handle.remove()
        return casts

    assert held(WHOLE) == held(None) >= LAYERS * 2 * WIDTH * WIDTH * 2

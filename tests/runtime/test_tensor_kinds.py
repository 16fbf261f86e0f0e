"""Layers whose tensors have no storage of their own: sparse ones, nested ones, and those inside vmap and jvp."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lowtide._torch_private.modes import dispatch_modes, function_modes
from lowtide._torch_private.saved_tensor_hooks import top_saved_tensors_hooks
from lowtide.errors import PolicyError
from lowtide.policy import LayerPolicy, Pattern, Policy, Recompute, Rule, Swap
from lowtide.runtime.apply import apply
from lowtide.runtime.limits import Limits

WIDTH = 16
DECISIONS = {
    "operators": LayerPolicy(rules=(Rule(Pattern(".*", "path"), Recompute()),)),
    "layers": LayerPolicy(Recompute()),
    "swap": LayerPolicy(Swap(1), boundary=Swap(1)),
    "disk": LayerPolicy(Swap(1, "disk")),
}
under_each = pytest.mark.parametrize("decision", DECISIONS.values(), ids=DECISIONS)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.weights = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 4)


class Graph(Base):
    def forward(self, x: Tensor) -> Tensor:
        edges = torch.eye(8).roll(1, 0)
        return x + functional.gelu(torch.sparse.mm(edges.to_sparse(), self.up(x)))


class CompressedGraph(Base):
    def forward(self, x: Tensor) -> Tensor:
        return x + functional.gelu(torch.eye(8).roll(1, 0).to_sparse_csr() @ self.up(x))


class Mapped(Base):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return x + torch.vmap(lambda weight: functional.gelu(hidden @ weight))(self.weights).mean(0)


class Inference(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            scale = x.detach().abs().mean() + 1
        return x + functional.gelu(self.up(x)) * float(scale) * scale.clone()


class Tangents(Base):
    def forward(self, x: Tensor) -> Tensor:
        y, tangent = torch.func.jvp(lambda z: torch.tanh(self.up(z)), (x,), (torch.ones_like(x),))
        return x + y + 0.1 * tangent


def run(layer: Callable[[], nn.Module], decision: LayerPolicy | None, x: Tensor) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer() for _ in range(3)))
    handle = None
    if decision is not None:
        handle = apply(model, Policy((decision,) * 3, origin="solver"), limits=Limits(minimum_bytes=1))
    values: list[Tensor] = []
    try:
        for _ in range(3):
            output = model(x)
            (output.values() if output.is_nested else output).square().sum().backward()
            values += [one.grad for one in model.parameters() if one.grad is not None]
            model.zero_grad()
    finally:
        if handle is not None:
            handle.remove()
        assert top_saved_tensors_hooks(False) is None
        assert not function_modes()
        assert not dispatch_modes()
    return values


def exact(layer: Callable[[], nn.Module], decision: LayerPolicy, x: Tensor) -> None:
    expected, found = run(layer, None, x), run(layer, decision, x)
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@under_each
@pytest.mark.parametrize("layer", [Graph, CompressedGraph, Mapped, Inference])
def test_tensors_without_a_storage(layer: type[nn.Module], decision: LayerPolicy) -> None:
    exact(layer, decision, torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)))


@under_each
def test_nested_tensors_are_kept(decision: LayerPolicy) -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(functional.gelu(self.up(x)))

    rows = [torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count)) for count in (3, 5, 2)]
    exact(Rows, decision, torch.nested.nested_tensor(rows, layout=torch.jagged))


@pytest.mark.parametrize("decision", [DECISIONS["operators"], DECISIONS["swap"]], ids=["operators", "swap"])
def test_forward_mode_is_refused_where_a_layer_is_profiled_and_leaves_nothing_on(decision: LayerPolicy) -> None:
    with pytest.raises(PolicyError, match="forward mode"):
        run(Tangents, decision, torch.randn(8, WIDTH))


def test_forward_mode_in_whole_layers() -> None:
    exact(Tangents, LayerPolicy(Recompute()), torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)))

"""``torch.compile``: operators and layers are recomputed in compiled models, and swapped around compiled layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.errors import PolicyError
from lowtide.policy import LayerPolicy, Policy, Swap
from lowtide.runtime.apply import Handle, apply
from lowtide.runtime.limits import Limits
from numerics.model import Value, build, gradients, loss_of, tokens_of, values
from numerics.policies import RECOMPUTING, SWAPPING, apply_column, every_policy

GRAPHS: list[int] = []


def backend(graph: Any, inputs: list[Tensor]) -> Any:
    from torch._dynamo.backends.debugging import aot_eager

    GRAPHS.append(1)
    return aot_eager(graph, inputs)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    GRAPHS.clear()
    yield
    torch._dynamo.reset()


def wrapped(model: nn.Module) -> None:
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer, backend=backend)


def in_place(model: nn.Module) -> None:
    for layer in model.layers:
        layer.compile(backend=backend)


def train(make: Callable[[], tuple[nn.Module, Handle | None]]) -> tuple[list[Value], Handle | None]:
    model, handle = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    record: list[Value] = []
    for step in range(2):
        tokens = tokens_of(step)
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        found = values(step, [("loss", loss), *gradients(model)])
        record += [Value(value.name.replace("_orig_mod.", ""), value.digest) for value in found]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return record, handle


def compiled_first(compile_layers: Callable[[nn.Module], None], column: str | None) -> Any:
    def make() -> tuple[nn.Module, Handle | None]:
        model = build(2)
        compile_layers(model)
        return model, apply_column(column, model)

    return train(make)


def applied_first(compile_layers: Callable[[nn.Module], None], column: str | None) -> Any:
    def make() -> tuple[nn.Module, Handle | None]:
        model = build(2)
        handle = apply_column(column, model)
        compile_layers(model)
        return model, handle

    return train(make)


WAYS = pytest.mark.parametrize(
    "compile_layers",
    [pytest.param(wrapped, id="torch.compile(layer)", marks=pytest.mark.slow), pytest.param(in_place, id="compile()")],
)
IN_GRAPHS = ["recompute operators", "recompute layers"]
"""What can be done inside a compiled function."""
AROUND = ["swap", "swap to disk", "boundary swap", "mixed"]
"""What is done by hooks around one."""


def recomputed_bytes(handle: Handle | None) -> int:
    """What is freed by recomputing, according to the compiled graphs."""
    assert handle is not None
    found = [one.freed_bytes for one in handle.receipt().settings if one.action == "recompute"]
    assert None not in found
    return sum(found)


@pytest.mark.composes
@pytest.mark.parametrize("row", ["compiled layers, Policy applied afterwards"])
@WAYS
@every_policy
def test_layers_compiled_before_are_exact(row: str, column: str, compile_layers: Any) -> None:
    expected, _ = compiled_first(compile_layers, None)
    torch._dynamo.reset()
    GRAPHS.clear()
    found, handle = compiled_first(compile_layers, column)
    assert found == expected
    assert len(GRAPHS) == len({str(one) for one in handle.policy.layers})  # each compiled as one piece
    if column in SWAPPING:
        assert sum(line.swaps for line in handle.ledger.lines.values())
    if column in RECOMPUTING or column == "recompute layers":
        assert recomputed_bytes(handle) > 0


@pytest.mark.composes
@pytest.mark.parametrize("row", ["layers compiled after the Policy is applied"])
@WAYS
@pytest.mark.parametrize("column", IN_GRAPHS)
def test_layers_compiled_afterwards_are_exact(row: str, column: str, compile_layers: Any) -> None:
    expected, _ = compiled_first(compile_layers, None)
    torch._dynamo.reset()
    GRAPHS.clear()
    found, handle = applied_first(compile_layers, column)
    assert found == expected
    assert len(GRAPHS) == 1  # layers with equal decisions share one graph
    assert recomputed_bytes(handle) > 0


@pytest.mark.composes(refused=PolicyError)
@pytest.mark.parametrize("row", ["layers compiled after the Policy is applied"])
@WAYS
@pytest.mark.parametrize("column", AROUND)
def test_what_would_be_inside_the_compiled_layer_is_refused(row: str, column: str, compile_layers: Any) -> None:
    with pytest.raises(PolicyError, match="runs inside torch"):
        applied_first(compile_layers, column)


@pytest.mark.composes(refused=PolicyError)
@pytest.mark.parametrize("row", ["the whole model compiled"])
@pytest.mark.parametrize("column", AROUND)
def test_a_policy_that_swaps_inside_a_compiled_model_is_refused(row: str, column: str) -> None:
    model = build(2)
    apply_column(column, model)
    with pytest.raises(PolicyError, match="runs inside torch"):
        torch.compile(model, backend=backend)(tokens_of(0))


@pytest.mark.composes
@pytest.mark.parametrize("row", ["the whole model compiled"])
@pytest.mark.parametrize("column", IN_GRAPHS)
@pytest.mark.parametrize("order", ["apply first", "compile first"])
def test_a_compiled_model_is_exact(row: str, column: str, order: str) -> None:
    def make(column: str | None) -> tuple[Any, Handle | None]:
        model = build(2)
        handle = apply_column(column, model) if order == "apply first" else None
        compiled = torch.compile(model, backend=backend)
        if order == "compile first":
            handle = apply_column(column, model)
        return compiled, handle

    expected, _ = train(lambda: make(None))
    GRAPHS.clear()
    torch._dynamo.reset()
    found, handle = train(lambda: make(column))
    assert found == expected
    assert len(GRAPHS) == 1
    assert recomputed_bytes(handle) > 0


@every_policy
def test_removing_leaves_compiled_layers_as_they_were(column: str) -> None:
    for compile_layers in (wrapped, in_place):
        model = build(2)
        compile_layers(model)
        before = [(layer.forward, layer._compiled_call_impl) for layer in model.layers]
        handle = apply_column(column, model)
        assert handle is not None
        handle.remove()
        assert [(layer.forward, layer._compiled_call_impl) for layer in model.layers] == before


@pytest.mark.parametrize("leaf", [True, False], ids=["in a leaf", "in the layer"])
def test_a_layer_that_calls_a_compiled_function_is_refused(leaf: bool) -> None:
    function = torch.compile(lambda x: torch.tanh(x) * x, backend="eager")

    class Gate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.gate = nn.Linear(4, 4), Gate()

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            return self.gate(x) if leaf else function(x)

    model = nn.Sequential(Layer(), Layer(), Layer())
    handle = apply(model, Policy((LayerPolicy(Swap(2)),) * 3), limits=Limits(minimum_bytes=1))
    with pytest.raises(PolicyError, match=r"a function that torch\.compile has compiled"):
        model(torch.randn(2, 4))
    handle.remove()
    model(torch.randn(2, 4)).sum().backward()

"""What lowtide relies on in torch's private names where it decides inside compiled models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lowtide._torch_private.compiled import NothingCompiled, between_graphs, default_stance, under_compilation
from lowtide._torch_private.graphs import (
    CUSTOM,
    Backend,
    JointGraph,
    Partitioner,
    call_while_traced,
    compiled_alike,
    drop_guards,
    graph_of,
    joint_graph,
    key_of,
    partitioned_by,
    through_dynamo,
    without_graph_cache,
    wrap_backend,
)
from lowtide._torch_private.operators import forget_dispatch
from lowtide.cost.imagined import device_kernels
from lowtide.errors import PolicyError
from lowtide.operators.joint_graph import copied, saved_by


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


COMPILING = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
"""Inductor builds with g++ what then runs; to read its joint graphs nothing is built."""

KEYS: list[str] = []
BACKENDS: list[str] = []
JOINT: list[set[str]] = []


def note(context: Any) -> None:
    KEYS.append(key_of(context))
    for node in graph_of(context).nodes:
        node.meta[CUSTOM] = {"test": node.name}
    wrap_backend(context, wrapped)
    wrap_backend(context, wrapped)  # the second time does nothing


def wrapped(backend: Backend) -> Backend:
    BACKENDS.append(backend.__name__)

    def compile_with_it(graph: Any, inputs: Any) -> Any:
        def wrap(partitioner: Partitioner) -> Partitioner:
            def split(joint: Any, *args: Any, **kwargs: Any) -> Any:
                JOINT.append({node.meta.get(CUSTOM, {}).get("test", "") for node in joint.graph.nodes})
                return partitioner(joint, *args, **kwargs)

            return split

        with without_graph_cache(), partitioned_by(wrap):
            return backend(graph, inputs)

    return compile_with_it


@pytest.mark.parametrize("backend", COMPILING)
def test_a_traced_function_is_called_and_what_it_notes_is_in_the_joint_graph(backend: str) -> None:
    def traced(x: Tensor, key: str) -> Tensor:
        y = torch.sin(x)
        call_while_traced(note, key)
        return y * y

    for record in (KEYS, BACKENDS, JOINT):
        record.clear()
    compiled = torch.compile(traced, backend=backend)
    for key in ("a", "a", "b"):
        compiled(torch.ones(3, requires_grad=True), key).sum().backward()
    assert KEYS == ["a", "b"]
    assert set(BACKENDS) == {backend}
    assert len(BACKENDS) == 2
    assert len(JOINT) == 2
    assert "y" in JOINT[0] or "sin" in JOINT[0]


FACTOR = 2.0
OTHER = 3.0


def test_guards_of_names_are_forgotten_and_the_others_are_not() -> None:
    traces: list[float] = []

    def forget(context: Any) -> None:
        traces.append(FACTOR)
        drop_guards(context, globals(), ["FACTOR", "call_while_traced"])

    def traced(x: Tensor) -> Tensor:
        y = x * FACTOR * OTHER
        call_while_traced(forget, "")
        return y

    compiled = torch.compile(traced, backend="aot_eager")
    with pytest.MonkeyPatch.context() as patch:
        assert compiled(torch.ones(1)).item() == 6.0
        patch.setitem(globals(), "FACTOR", 5.0)
        assert compiled(torch.ones(1)).item() == 6.0  # nothing looks at it
        patch.setitem(globals(), "OTHER", 4.0)
        assert compiled(torch.ones(1)).item() == 20.0
    assert traces == [2.0, 5.0]


def test_an_error_of_ours_reaches_the_caller_of_what_is_compiled() -> None:
    def refuse(context: Any) -> None:
        raise through_dynamo(PolicyError("not like this"))

    def traced(x: Tensor) -> Tensor:
        call_while_traced(refuse, "")
        return x + 1

    with pytest.raises(PolicyError, match="not like this"):
        torch.compile(traced, backend="aot_eager")(torch.ones(3))


def test_what_runs_between_graphs_is_not_compiled_and_what_it_calls_is() -> None:
    seen: list[bool] = []

    def inner(x: Tensor) -> Tensor:
        return torch.sin(x) * 2

    def make(forward: Any) -> Any:
        def around(x: Tensor) -> Tensor:
            seen.append(under_compilation())
            return forward(x) + 1

        return around

    function = between_graphs(inner, make)
    compiled = torch.compile(lambda x: function(x * 3) * 2, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    x = torch.ones(3)
    assert torch.equal(compiled(x), (torch.sin(x * 3) * 2 + 1) * 2)
    assert seen == [False]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3  # before, inside and after


class Product(torch.nn.Module):
    """Torch's own modules are not compiled in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sin()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_joint_graph_is_read_and_split_before_anything_is_compiled(backend: str) -> None:
    def read(joint: JointGraph) -> tuple[list[int], int, bool]:
        forward, backward = joint.split(copied(joint.module))
        assert len(saved_by(forward.graph, joint.outputs)) == sum(
            node.op == "placeholder" and "tangents" not in node.name for node in backward.graph.nodes
        )
        return [id(one) for one in joint.inputs], joint.outputs, joint.fuses

    layer, x = Product(), torch.ones(2, 3)
    layer.compile(backend=backend)
    given, outputs, fuses = joint_graph(lambda: layer(x), read)
    assert set(given) == {id(x), id(layer.inner.weight)}
    assert (outputs, fuses) == (1, backend == "inductor")
    assert joint_graph(lambda: None, read) is None
    with pytest.raises(ZeroDivisionError):
        joint_graph(lambda: layer(x), lambda joint: 1 / 0)


@pytest.mark.parametrize("backend", COMPILING)
def test_what_a_joint_graph_was_read_of_is_compiled_as_before(backend: str) -> None:
    layer, x = Product(), torch.ones(2, 3)
    layer.compile(backend=backend)
    joint_graph(lambda: layer(x), lambda joint: joint.fuses)
    assert layer(x).requires_grad


def test_another_layer_is_compiled_with_the_backend_of_the_model() -> None:
    model = torch.compile(Product(), backend="aot_eager")
    fuses = joint_graph(lambda: compiled_alike(model, Product())(torch.ones(2, 3)), lambda joint: joint.fuses)
    assert fuses is False
    plain = Product()
    assert joint_graph(lambda: compiled_alike(plain, plain)(torch.ones(2, 3)), lambda joint: joint.fuses)


def test_what_is_compiled_is_compiled_inside_the_default_stance() -> None:
    layer = Product()
    layer.compile(backend="aot_eager")
    eager = NothingCompiled()
    with eager:
        assert joint_graph(lambda: layer(torch.ones(2, 3)), lambda joint: joint.outputs) is None
        with default_stance():
            assert joint_graph(lambda: layer(torch.ones(2, 3)), lambda joint: joint.outputs) == 1


def test_what_was_compiled_under_imagined_kernels_leaves_no_kernel_behind() -> None:
    def dropped(x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5).sin()

    with device_kernels("cuda"):
        found = joint_graph(
            lambda: torch.compile(dropped, backend="aot_eager")(torch.ones(8, requires_grad=True)), lambda joint: joint
        )
        assert found is not None
    assert not torch.ops.aten.dropout.default._dispatch_cache
    torch._dynamo.reset()
    x = torch.ones(8, requires_grad=True)
    torch.manual_seed(0)
    torch.compile(dropped, backend="aot_eager")(x).sum().backward()
    assert x.grad is not None
    forget_dispatch("dropout")

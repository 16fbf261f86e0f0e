"""Decisions inside compiled models: the names of eager mode, what is held, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tide
from lowtide.errors import PolicyError, UnmatchedError
from lowtide.operators.layers import find_layers
from lowtide.operators.survey import survey
from lowtide.policy import Decision, Keep, LayerPolicy, Policy, Recompute, Rule, Swap
from lowtide.runtime.apply import Handle, apply
from lowtide.runtime.graph import GraphLayer
from lowtide.runtime.limits import Limits
from support.parity_models import build, stacks_of
from tide.testing import fresh_tide  # noqa: F401

WIDTH = 16


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (WIDTH,), self.weight)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down, self.dropout = nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(functional.silu(self.gate(x)) * self.up(x)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = Norm(), Gated()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, layers: int = 3, layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


Compile = Callable[[nn.Module], Any]


def by_layer(model: nn.Module, backend: str = "aot_eager") -> nn.Module:
    for layer in model.layers:
        layer.compile(backend=backend)
    return model


def whole(model: nn.Module, backend: str = "aot_eager") -> Any:
    return torch.compile(model, backend=backend)


WAYS = pytest.mark.parametrize("way", [by_layer, whole], ids=["by layer", "whole model"])


def policy(layers: int = 3, **rules: Decision) -> Policy:
    settings = LayerPolicy(rules=tuple(Rule(name.replace("__", "."), decision) for name, decision in rules.items()))
    return Policy((settings,) * layers, origin="solver")


def steps(compiled: Any, model: nn.Module, lengths: tuple[int, ...] = (8, 8), autocast: bool = False) -> list[Tensor]:
    found = []
    for step, length in enumerate(lengths):
        torch.manual_seed(step)
        x = torch.randn(2, length, WIDTH, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = compiled(x).float().square().mean()
        loss.backward()
        found += [loss.detach(), x.grad, *(one.grad.clone() for one in model.parameters() if one.grad is not None)]
        model.zero_grad()
    return found


def run(way: Compile, decided: Policy | None, **settings: Any) -> tuple[list[Tensor], Handle | None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Model(len(decided.layers) if decided is not None else 3)
    compiled = way(model)
    handle = apply(model, decided, limits=Limits(minimum_bytes=1)) if decided is not None else None
    return steps(compiled, model, **settings), handle


def exact(way: Compile, decided: Policy, **settings: Any) -> Handle:
    expected, _ = run(way, None, **settings)
    found, handle = run(way, decided, **settings)
    assert all(map(torch.equal, found, expected))
    assert handle is not None
    return handle


def freed(handle: Handle) -> dict[str, int | None]:
    return {one.setting: one.freed_bytes for one in handle.receipt().settings}


VALUE, DOUBLE = 2 * 8 * WIDTH * 4, 2 * 8 * 2 * WIDTH * 4
"""The bytes of a layer's input, and of what is twice as wide."""


@WAYS
def test_what_is_freed_is_what_the_operators_hold(way: Compile) -> None:
    handle = exact(way, policy(mlp__up=Recompute(), mlp__mul=Recompute()))
    assert freed(handle) == {"mlp.up": 3 * DOUBLE, "mlp.mul": 3 * DOUBLE}
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) == 0


@WAYS
def test_layers_that_are_recomputed_hold_their_input(way: Compile) -> None:
    handle = exact(way, Policy((LayerPolicy(Recompute()),) * 3))
    for one in handle.compiled_bytes().values():
        assert not {name: size for name, size in one.held.items() if name != "add"}
        assert one.held.get("add", 0) in (0, VALUE)  # the next layer's input
    assert freed(handle)["the whole layer"] > 3 * 3 * DOUBLE


@WAYS
def test_an_operator_that_is_kept_is_not_recomputed_with_its_layer(way: Compile) -> None:
    settings = LayerPolicy(Recompute(), rules=(Rule("mlp.up", Keep()),))
    handle = exact(way, Policy((settings,) * 3, origin="solver"))
    assert [one.held.get("mlp.up") for one in handle.compiled_bytes().values()] == [DOUBLE] * 3


@WAYS
def test_a_cast_belongs_to_what_it_is_of(way: Compile) -> None:
    handle = exact(way, policy(norm=Recompute()), autocast=True)
    assert not any("norm" in one.held for one in handle.compiled_bytes().values())


def test_casts_and_views_are_freed_with_their_operator_under_autocast() -> None:
    handle = exact(by_layer, policy(norm=Recompute(), mlp__mul=Recompute(), mlp__up=Recompute()), autocast=True)
    assert set(handle.compiled_bytes()[0].held) <= {"mlp.gate", "mlp.dropout", "mlp.silu"}


def test_swapped_operators_leave_a_compiled_layer() -> None:
    handle = exact(by_layer, policy(mlp__up=Swap(2), mlp__mul=Recompute(), norm=Swap(4)))
    receipt = handle.receipt()
    assert {one.operator for one in receipt.operators} == {"mlp.up", "norm"}
    assert {one.setting: one.moved_bytes for one in receipt.settings}["mlp.up"] == 2 * 3 * DOUBLE
    assert not any("not known" in note for one in receipt.operators for note in one.notes)


def test_swapped_operators_are_found_in_graphs_of_several_lengths() -> None:
    handle = exact(by_layer, policy(mlp__up=Swap(2), mlp__mul=Recompute()), lengths=(8, 12, 6, 10, 8))
    receipt = handle.receipt()
    assert {one.operator for one in receipt.operators} == {"mlp.up"}
    assert sum(one.swaps for one in receipt.operators) == 3 * 5


@pytest.mark.parametrize(
    "way", [by_layer, pytest.param(whole, marks=pytest.mark.slow)], ids=["by layer", "whole model"]
)
def test_layers_may_have_more_kinds_of_decisions_than_dynamo_recompiles(way: Compile) -> None:
    names = ["norm", "mlp.up", "mlp.gate", "mlp.silu", "mlp.mul", "mlp.down", "mlp.dropout", "add"]
    layers = [LayerPolicy(rules=(Rule(name, Recompute()),)) for name in names]
    layers += [LayerPolicy(rules=(Rule(name, Recompute()), Rule("mlp.up", Recompute()))) for name in names[2:]]
    many = Policy(tuple(layers), origin="solver")
    found, handle = run(way, many)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == (1 if way is whole else len(layers))
    assert handle is not None
    assert len(handle.compiled_bytes()) == len(layers)
    assert all(one.isfinite().all() for one in found)


@WAYS
def test_a_policy_is_switched_by_one_recompilation_at_most(way: Compile) -> None:
    torch.manual_seed(0)
    model = Model()
    compiled = way(model)

    def graphs_of(decided: Policy | None) -> int:
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        handle = apply(model, decided) if decided is not None else None
        steps(compiled, model)
        if handle is not None:
            assert all(value for value in freed(handle).values())
            handle.remove()
        return torch._dynamo.utils.counters["stats"]["unique_graphs"] - before

    first, second = policy(mlp__up=Recompute()), policy(mlp__mul=Recompute())
    assert [graphs_of(one) for one in (None, first, second, None)] == [1, 1, 1, 0]
    assert graphs_of(first) <= 1  # some versions of torch have a model's graph for these very functions of its layers


@pytest.mark.parametrize(
    "backend",
    # The cache of graphs is turned off for both alike; the kernels of the second take a C++ compiler half a minute.
    ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)],
)
def test_torchs_caches_do_not_bring_back_another_policy(backend: str) -> None:
    held = []
    for decided in (policy(mlp__up=Recompute()), policy(mlp__mul=Recompute()), policy(mlp__up=Recompute())):
        _, handle = run(lambda model: by_layer(model, backend), decided)
        assert handle is not None
        held.append({name for name in ("mlp.up", "mlp.mul") if name in handle.compiled_bytes()[0].held})
        handle.remove()
    assert held == [{"mlp.mul"}, {"mlp.up"}, {"mlp.mul"}]


@WAYS
def test_a_pattern_that_matches_nothing_is_an_error_as_in_eager_mode(way: Compile) -> None:
    with pytest.raises(UnmatchedError, match=r"mlp\.upp .*did you mean mlp\.up"):
        run(way, policy(mlp__upp=Recompute()))


@WAYS
def test_a_setting_without_effect_is_reported(way: Compile) -> None:
    _, handle = run(way, policy(mlp__silu=Recompute()))
    assert handle is not None
    (setting,) = handle.receipt().settings
    assert setting.freed_bytes == 0
    assert "no effect: the compiler saves nothing of it" in setting.notes


class Branching(Layer):
    """Layers alike but for a setting that says what they do."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        self.gated = bool(Branching.made % 2)
        Branching.made += 1

    def forward(self, x: Tensor) -> Tensor:
        h = self.mlp.up(self.norm(x))
        h = h.sigmoid() * self.mlp.gate(x) if self.gated else h.exp().tanh()
        return x + self.mlp.down(h)


@WAYS
def test_layers_of_one_structure_may_have_other_operators(way: Compile) -> None:
    found, handle = [], None
    for decided in (None, policy(4, mul=Recompute(), tanh=Recompute())):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = Model(4, Branching)
        compiled = way(model)
        handle = apply(model, decided, allow_unmatched=True) if decided is not None else None
        found.append(steps(compiled, model))
    assert all(map(torch.equal, *found))
    assert handle is not None
    for index, one in enumerate(handle.compiled_bytes().values() if way is whole else ()):
        assert not {"mul", "tanh"} & set(one.held), index


POSITIONS = torch.arange(8.0)[:, None]


class Positioned(Layer):
    """Each layer computes a value that is the same for all, as the mask of a fused attention is."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x) * torch.cos(POSITIONS))


def test_a_value_that_all_layers_compute_is_held_once_and_counts_as_read() -> None:
    model = Model(layer=Positioned)
    compiled = whole(model)
    handle = apply(model, policy(cos=Recompute(), mul=Recompute()))
    steps(compiled, model)
    held = [one.held.get("cos", 0) for one in handle.compiled_bytes().values()]
    assert held == [8 * 4, 0, 0]
    read = [one.inputs for one in handle.compiled_bytes().values()]
    assert sum(read) == 3 * VALUE + sum(held)  # besides each layer's norm


class Breaking(Layer):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        torch._dynamo.graph_break()
        return x + self.mlp(h)


@WAYS
def test_a_graph_that_breaks_in_a_decided_layer_is_refused(way: Compile) -> None:
    model = Model(layer=Breaking)
    compiled = way(model)
    handle = apply(model, policy(mlp__up=Recompute()))
    with pytest.raises(PolicyError, match="breaks its graph inside a layer"):
        steps(compiled, model)
    handle.remove()
    torch._dynamo.reset()
    steps(compiled, model)


@WAYS
def test_a_layer_in_which_the_graph_breaks_can_be_recomputed_as_a_whole(way: Compile) -> None:
    found = []
    for decided in (None, Policy((LayerPolicy(Recompute()),) * 3)):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = Model(layer=Breaking)
        compiled = way(model)
        handle = apply(model, decided) if decided is not None else None
        found.append(steps(compiled, model))
    assert all(map(torch.equal, *found))
    assert handle is not None
    receipt = handle.receipt()
    assert any("breaks its graph" in note for one in receipt.operators for note in one.notes)
    assert sum(one.recomputes for one in receipt.operators)


def test_a_layer_in_which_the_graph_broke_is_restored_and_can_be_decided_again() -> None:
    model = Model(layer=Breaking)
    by_layer(model)
    before = [dict(vars(layer)) for layer in model.layers]
    handles = []
    for _ in range(2):
        handles.append(apply(model, Policy((LayerPolicy(Recompute()),) * 3)))
        torch._dynamo.reset()
        steps(model, model)
        handles[-1].remove()
        assert [dict(vars(layer)) for layer in model.layers] == before


def test_a_backend_that_does_not_split_a_joint_graph_is_refused() -> None:
    with pytest.raises(PolicyError, match="the backend eager of torch"):
        run(lambda model: whole(model, "eager"), policy(mlp__up=Recompute()))


def test_a_layer_that_ran_in_eager_mode_can_be_compiled_and_run_in_eager_mode_again() -> None:
    expected, _ = run(lambda model: model, None, lengths=(8, 8, 8))
    torch.manual_seed(0)
    model = Model()
    handle = apply(model, policy(mlp__up=Recompute(), mlp__mul=Recompute()))
    found = steps(model, model, lengths=(8,))
    torch.manual_seed(0)
    assert all(map(torch.equal, found, expected))
    recomputes = sum(line.recomputes for line in handle.ledger.lines.values())
    assert recomputes == 4  # all but the first layer, which was profiled
    steps(whole(model), model)
    assert sum(line.recomputes for line in handle.ledger.lines.values()) == recomputes
    assert handle.compiled_bytes()[0].freed() > 0
    steps(model, model, lengths=(8,))
    assert sum(line.recomputes for line in handle.ledger.lines.values()) == recomputes + 6


def test_a_model_without_gradients_is_compiled_as_it_is() -> None:
    model = Model()
    apply(model, policy(mlp__up=Recompute()))
    with torch.no_grad():
        assert whole(model)(torch.ones(1, 4, WIDTH)).shape == (1, 4, WIDTH)


ON_DEVICE = {
    "recompute": (policy(6, mlp__up=Recompute(), mlp__mul=Recompute()), 2 * 2),
    "swap": (policy(6, mlp__up=Swap(9), mlp__gate=Swap(9), mlp__mul=Swap(9)), 3 * 2),
    "both": (policy(6, mlp__up=Swap(9), mlp__gate=Swap(9), mlp__mul=Recompute(), norm=Recompute()), 3 * 2),
    "whole layers": (Policy((LayerPolicy(Recompute()),) * 6), 3 * 2),
}
"""Policies for six layers, and at least how many tensors as wide as a layer's input each of them frees."""


def on_device(decided: Policy | None) -> tuple[list[Tensor], int, Handle | None]:
    """Two steps on the virtual accelerator: gradients, what the second holds after forward, and the handle."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Model(6).to("tide")
    by_layer(model)
    handle = apply(model, decided, limits=Limits(minimum_bytes=1)) if decided is not None else None
    found = []
    for step in range(2):
        torch.manual_seed(step)
        x = torch.randn(8, 64, WIDTH).to("tide").requires_grad_()
        before = torch.accelerator.memory_allocated()
        output = model(x)
        torch.accelerator.synchronize()
        held = torch.accelerator.memory_allocated() - before
        output.square().mean().backward()
        found += [one.grad.cpu() for one in model.parameters()]
        model.zero_grad()
    return found, held, handle


@pytest.mark.parametrize("what", ON_DEVICE)
def test_what_is_decided_really_leaves_the_device(what: str, fresh_tide: None) -> None:  # noqa: F811
    decided, values = ON_DEVICE[what]
    expected, all_of_it, _ = on_device(None)
    found, held, handle = on_device(decided)
    assert all(map(torch.equal, found, expected))
    one_layer = values * 8 * 64 * WIDTH * 4
    assert all_of_it - held >= (5 if decided.layers[0].rules else 6) * one_layer  # the last one's is due in backward
    assert handle is not None
    assert not tide.races()


def test_random_numbers_that_torch_cannot_draw_again_are_kept(fresh_tide: None) -> None:  # noqa: F811
    expected, _, _ = on_device(None)
    found, _, handle = on_device(policy(6, mlp__dropout=Recompute()))
    assert all(map(torch.equal, found, expected))
    assert handle is not None
    (setting,) = handle.receipt().settings
    assert "no effect: torch cannot repeat it in a compiled graph on this device" in setting.notes


class Operators(nn.Module):
    """What Python's operators are called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        a, b = h.chunk(2, -1)
        y = torch.cat((a / 2, 1 / (b.square() + 1)), -1)
        y = (1 - y) * h.exp() + (y - 3).pow(2) - -y @ self.linear.weight
        y = y.contiguous().transpose(0, 1).contiguous().transpose(0, 1)
        filled = torch.empty_like(y)
        filled[:, :1] = y[:, 1:2]
        filled[:, 1:].copy_(y[:, 1:])
        filled += 1
        filled *= h.sigmoid()
        return self.linear(filled) % 7 + 2 ** y.tanh()


def names(model: nn.Module, given: Callable[[Any], Any], layers: str | None, way: str) -> list[tuple[list[str], ...]]:
    """For each layer its operators in eager mode, and in a compiled graph."""
    found = survey(model, lambda: given(model), layers=layers)
    graphs = []
    for index, layer in enumerate(find_layers(model, layers).modules):
        settings = LayerPolicy(rules=(Rule(f"nothing_{index}", Recompute()),))
        graph = GraphLayer.of(layer, settings, Policy((settings,)))
        graphs.append(graph)
        layer.forward = graph.traceable(layer.forward, layer.forward)
        if way == "by layer":
            layer.compile(backend="aot_eager")
    result = given(model if way == "by layer" else torch.compile(model, backend="aot_eager"))
    (result if isinstance(result, Tensor) else result[0]).sum().backward()
    eager = [[one.name for one in found.kinds[kind].operators] for kind in found.kind_of]
    return list(zip(eager, ([one.name for one in graph.catalogue or ()] for graph in graphs), strict=True))


def test_operators_of_python_have_the_names_of_eager_mode() -> None:
    model = Model(2, Operators)
    for eager, compiled in names(model, lambda model: model(torch.randn(2, 4, WIDTH)), None, "by layer"):
        assert compiled == eager


FAMILIES = ["reference", "llama", "gpt2", "vit"]
SLOW = ["deepseek", "t5", "reference_moe", "qwen3_moe", "gemma", "bert", "whisper", "convnext", "rwkv"]


@pytest.mark.parametrize("way", ["by layer", pytest.param("whole model", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_every_operator_of_eager_mode_is_found_in_a_compiled_graph(family: str, way: str) -> None:
    tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
    for layers in stacks_of(family):
        torch._dynamo.reset()
        model = build(family)
        for eager, compiled in names(model, lambda model: model(tokens), layers, way):
            assert set(eager) <= set(compiled)
            assert [name for name in compiled if name in eager] == eager  # in the same order

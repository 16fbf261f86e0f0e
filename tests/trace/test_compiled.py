"""Compiled layers in a Trace: what they save, under any Policy, is what the compiled layers really hold."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import metrics as inductor_metrics
from torch._inductor.compile_fx import inductor_metrics_log
from torch.nn import functional

import lowtide
import tide
from lowtide._torch_private.fake import FakeTensorMode
from lowtide.operators.layers import find_layers
from lowtide.planner.make import make_plan
from lowtide.policy import LayerPolicy, Policy, Recompute, Rule
from lowtide.trace.capture import capture
from lowtide.trace.pieces import FUSED
from lowtide.trace.trace import Kernel, Trace
from support.compiled_bytes import held_bytes, predicted_bytes
from support.compiled_cases import MODELS
from support.garbage import collect_garbage
from support.parity_models import VOCABULARY, stacks_of
from tide.testing import fresh_tide  # noqa: F401


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


class Subject:
    """A model whose layers are compiled."""

    def __init__(self, name: str, *, autocast: bool = False, backend: str = "aot_eager") -> None:
        torch._dynamo.reset()
        self.path = "blocks" if name == "nanochat" else stacks_of(name)[-1]
        self.model, self.autocast = MODELS[name](), autocast
        self.layers = find_layers(self.model, self.path).modules
        self.tokens = torch.randint(0, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(0))
        for layer in self.layers:
            layer.compile(backend=backend)

    def run(self) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            output = self.model(self.tokens)
            return (output if isinstance(output, Tensor) else output[0]).float().square().mean()

    def trace(self) -> Trace:
        return capture(self.model, self.run, layers=self.path, rounds=0)

    def held(self) -> int:
        return held_bytes(self.run, self.layers, self.model)


NAMES = ["nanochat", "llama", "gpt2"]
QUICK = [("llama", True)]


@pytest.mark.parametrize(
    ("name", "autocast"),
    [
        pytest.param(name, autocast, marks=[] if (name, autocast) in QUICK else [pytest.mark.slow])
        for name in NAMES
        for autocast in (False, True)
    ],
    ids=lambda value: {False: "fp32", True: "bf16"}.get(value),
)
def test_undecided_layers_save_what_they_really_hold(name: str, autocast: bool) -> None:
    subject = Subject(name, autocast=autocast)
    trace = subject.trace()
    assert predicted_bytes(trace) == subject.held()
    assert any("2 layers are priced from the split joint graph" in note for note in trace.notes)


def some(trace: Trace, chance: random.Random) -> Policy:
    names = [one.name for one in trace.parts[0].operators]
    share = chance.choice((0.2, 0.5, 0.8))
    rules = tuple(Rule(name, Recompute()) for name in names if chance.random() < share)
    return Policy((LayerPolicy(rules=rules),), "solver", any_depth=True)


def differences(name: str, autocast: bool, count: int) -> list[float]:
    """The predicted bytes over those that are really held, for random Policies."""
    trace = Subject(name, autocast=autocast).trace()
    found = []
    for number in range(count):
        policy = some(trace, random.Random(number))
        subject = Subject(name, autocast=autocast)
        lowtide.apply(subject.model, policy, layers=subject.path, allow_unmatched=True)
        found.append(predicted_bytes(trace, policy) / subject.held())
    return found


@pytest.mark.parametrize(
    ("name", "autocast", "count"),
    [("llama", False, 3)]
    + [pytest.param(name, autocast, 8, marks=pytest.mark.slow) for name in NAMES for autocast in (False, True)],
)
def test_what_random_policies_hold_is_predicted(name: str, autocast: bool, count: int) -> None:
    ratios = differences(name, autocast, count)
    assert min(ratios) > 0.97
    assert max(ratios) < 1.05


class Gated(nn.Module):
    """A layer without attention, which has no kernel under AOT on the virtual accelerator."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.gate = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class Stack(nn.Module):
    def __init__(self, layers: int = 6, width: int = 64, *, layer: Callable[[int], nn.Module] = Gated) -> None:
        super().__init__()
        self.embedding = nn.Linear(width, width)
        self.layers = nn.ModuleList(layer(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x


def compiled(model: nn.Module, backend: str = "aot_eager") -> nn.Module:
    for layer in model.layers:
        layer.compile(backend=backend)
    return model


def test_a_plan_within_a_budget_keeps_to_it_on_the_device(fresh_tide: None) -> None:  # noqa: F811
    torch.manual_seed(0)
    model = compiled(Stack().to("tide"))
    x = torch.randn(64, 64, 64).to("tide")
    trace = capture(model, lambda: model(x).square().mean(), rounds=0).without_seconds()
    kept = make_plan(trace, "1GiB", "h100")
    budget = (kept.least + kept.simulation.reserved) // 2
    for plan in (kept, make_plan(trace, budget, "h100", swap=False)):
        torch._dynamo.reset()
        handle = lowtide.apply(model, plan.policy)
        measured = peak(lambda: model(x).square().mean().backward(), model)
        handle.remove()
        parts = (trace.before, trace.after, *(trace.parts[place] for place in trace.layers))
        static = sum((size + 511) // 512 * 512 for part in parts for size in part.static.parameters)
        assert plan.feasible
        assert plan.simulation.peak - static - x.nbytes == pytest.approx(measured, rel=2e-3)
    assert not tide.races()


def peak(step: Callable[[], Any], model: nn.Module) -> int:
    """The most memory of a warm step, above what is there before."""
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        collect_garbage()
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        step()
        torch.accelerator.synchronize()
    return torch.accelerator.max_memory_allocated() - before


def test_fake_layers_are_priced_as_real_ones_are() -> None:
    real, x = compiled(Stack(2)), torch.randn(4, 8, 64)
    expected = capture(real, lambda: real(x).sum(), rounds=0).without_seconds()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, given = compiled(Stack(2)), torch.randn(4, 8, 64)
        own = list(model.parameters())
        trace = capture(model, lambda: model(given).sum())
    assert [part.packs for part in trace.parts] == [part.packs for part in expected.parts]
    assert [part.kernels for part in trace.parts] == [part.kernels for part in expected.parts]
    assert all(one is other for one, other in zip(own, model.parameters(), strict=True))
    assert "forward" not in model.layers[0].__dict__


class Mixed(nn.Module):
    """Two kernels that cannot be one read a sum of products, which is computed from so many others."""

    def __init__(self, width: int, products: int) -> None:
        super().__init__()
        self.factors = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2 * products))
        self.down, self.mean = (nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        factors = [factor(x) for factor in self.factors]
        mixed = sum(one * other for one, other in zip(factors[::2], factors[1::2], strict=True))
        return x + self.down(functional.silu(mixed)) + self.mean(mixed.sum(1, keepdim=True))


def kernels_of(backend: str, layer: Callable[[int], nn.Module]) -> tuple[Kernel, ...]:
    """The kernels of a compiled layer, as its Trace says."""
    torch._dynamo.reset()
    model, x = compiled(Stack(2, layer=layer), backend), torch.randn(4, 8, 64)
    part = capture(model, lambda: model(x).sum(), rounds=0).parts[0]
    assert any(kernel.kind == FUSED for kernel in part.kernels) == (backend == "inductor")
    return part.kernels


@pytest.mark.slow  # Inductor counts what it then compiles with g++
@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(Gated, id="gated"),
        pytest.param(partial(Mixed, products=2), id="of 4 others, computed again"),
        pytest.param(partial(Mixed, products=3), id="of 6 others, kept"),
    ],
)
def test_fused_kernels_touch_what_inductor_says_that_they_do(
    layer: Callable[[int], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    touched = sum(kernel.touched for kernel in kernels_of("inductor", layer))
    torch._dynamo.reset()
    model = compiled(Stack(1, layer=layer), "inductor")
    with (
        torch._inductor.config.patch(force_disable_caches=True),
        caplog.at_level("INFO", logger=inductor_metrics_log.name),  # without it nothing is counted
    ):
        inductor_metrics.reset()
        model(torch.randn(4, 8, 64)).sum().backward()
    assert touched == inductor_metrics.num_bytes_accessed


def test_fused_kernels_touch_less_than_those_of_eager_mode() -> None:
    fused, eager = (kernels_of(backend, Gated) for backend in ("inductor", "aot_eager"))
    assert [sum(one.flops for one in kernels) for kernels in (fused, eager)] == [9 * 2 * 32 * 64 * 192] * 2
    assert sum(one.touched for one in fused) < 0.85 * sum(one.touched for one in eager)
    wide = 32 * 192 * 4  # forward: one in, silu having read the other, one out; backward: three in, two gradients out
    assert [one.touched for one in fused if one.operator == "mul"] == [2 * wide, 5 * wide]


def test_a_model_compiled_as_a_whole_has_its_layers_priced_alone() -> None:
    model, x = Stack(2), torch.randn(4, 8, 64)
    whole = torch.compile(model, backend="aot_eager")
    trace = capture(whole, lambda: whole(x).sum(), rounds=0)
    alone = capture(compiled(model), lambda: model(x).sum(), rounds=0)
    assert predicted_bytes(trace) == predicted_bytes(alone)
    assert any("each as if it were compiled alone" in note for note in trace.notes)


class Breaking(Gated):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def test_a_plan_says_that_layers_were_priced_in_eager_mode_and_why() -> None:
    model, x = Stack(2), torch.randn(4, 8, 64)
    model.layers = nn.ModuleList(Breaking(64) for _ in range(2))
    compiled(model)
    plan = lowtide.plan(model, lambda: model(x).sum(), budget="1GiB", device="h100")
    notes = [note for note in plan.notes if "priced" in note]
    assert len(notes) == 1
    why = "torch.compile breaks its graph inside the layer"
    assert notes[0] == f"2 layers are compiled, and priced in eager mode, where more is held: {why}"


def test_a_plan_says_that_compiled_layers_were_priced_and_an_eager_one_says_nothing() -> None:
    model, x = Stack(2), torch.randn(4, 8, 64)
    eager = lowtide.plan(model, lambda: model(x).sum(), budget="1GiB", device="h100")
    assert not any("priced" in note for note in eager.notes)
    plan = lowtide.plan(compiled(model), lambda: model(x).sum(), budget="1GiB", device="h100")
    assert any(note.startswith("2 layers are priced from the split joint graph") for note in plan.notes)
    assert plan.simulation.peak < eager.simulation.peak
    handle = lowtide.apply(model, plan.policy)
    model(x).sum().backward()
    handle.remove()

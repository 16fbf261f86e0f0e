"""The adaptive mode on compiled layers: measured in eager mode, planned, and compiled again with the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from lowtide.errors import PolicyError
from lowtide.runtime.compiled import compiled_in_place
from tide.testing import fresh_tide  # noqa: F401

WIDTH, LAYERS, STEPS = 16, 6, 12


@pytest.fixture(autouse=True)
def _fresh(fresh_tide: None) -> Iterator[None]:  # noqa: F811
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.silu(self.gate(x)) * self.up(x))


def train(compile_model: Callable[[nn.Module], Any], budget: int | None, **settings: Any) -> tuple[list[Any], ...]:
    """Losses and parameters, the peak of each step, and the run's events."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(LAYERS))).to("tide")
    called = compile_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    adapted = called if isinstance(called, nn.Module) else model
    run = lowtide.adapt(adapted, optimizer, budget=budget, **settings) if budget is not None else None
    try:
        return steps(called, model, optimizer, run)
    finally:
        if run is not None:
            run.remove()


def steps(called: Any, model: nn.Module, optimizer: Any, run: lowtide.Adaptive | None) -> tuple[list[Any], ...]:
    peaks, losses = [], []
    for step in range(STEPS):
        x = torch.randn(128, 256, WIDTH, generator=torch.Generator().manual_seed(step)).to("tide").requires_grad_()

        def one_step(x: Tensor = x) -> Tensor:
            loss = called(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        torch.accelerator.reset_peak_memory_stats()
        losses.append((run.step(one_step) if run is not None else one_step()).detach().cpu())
        peaks.append(torch.accelerator.max_memory_allocated())
    events = [event.text for event in run.events] if run is not None else []
    return [*losses, *(one.detach().cpu() for one in model.parameters())], peaks, events


def in_place(model: nn.Module) -> nn.Module:
    for layer in model:
        layer.compile(backend="aot_eager")
    return model


@pytest.mark.parametrize(
    ("share", "swap"),
    [pytest.param(0.75, False, marks=pytest.mark.slow), (0.75, True), pytest.param(0.6, True, marks=pytest.mark.slow)],
)
def test_compiled_layers_are_planned_for_and_stay_below_the_budget(share: float, swap: bool) -> None:
    expected, kept, _ = train(in_place, None)
    budget = int(share * max(kept))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    found, peaks, events = train(in_place, budget, swap=swap)
    assert all(map(torch.equal, found, expected))
    assert max(peaks[1:]) <= budget < max(kept)
    assert any("the layers are compiled" in text for text in events)
    assert any("layers planned for" in text for text in events)
    assert not any("offloaded" in text for text in events)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > graphs  # the last steps were compiled
    assert torch.compiler.is_compiling() is False


@pytest.mark.parametrize("share", [pytest.param(0.9, marks=pytest.mark.slow), 0.75])
def test_a_model_that_is_compiled_as_a_whole_is_planned_for_without_swap(share: float) -> None:
    def whole(model: nn.Module) -> Any:
        return torch.compile(model, backend="aot_eager")

    expected, kept, _ = train(whole, None)
    budget = int(share * max(kept))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    found, peaks, events = train(whole, budget)
    assert all(map(torch.equal, found, expected))
    assert max(peaks[1:]) <= budget < max(kept)
    assert any("the model is compiled as a whole" in text for text in events)
    assert any("layers planned for" in text for text in events)
    assert not any("offloaded" in text for text in events)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > graphs  # the last steps were compiled
    assert torch._dynamo.utils.counters["graph_break"] == {}


def test_a_model_inside_a_compiled_one_is_refused_in_its_first_step() -> None:
    def hidden(model: nn.Module) -> Any:
        compiled = torch.compile(model, backend="aot_eager")
        return lambda x: compiled(x)

    with pytest.raises(PolicyError, match="given a model inside a compiled one"):
        train(hidden, 1 << 30)


def test_what_is_compiled_in_place_is_known() -> None:
    model = nn.Sequential(*(Layer() for _ in range(3)))
    assert compiled_in_place(model)
    model[0].up.compile(backend="aot_eager")
    assert not compiled_in_place(model)
    model[0].up._compiled_call_impl = None
    assert compiled_in_place(in_place(model))
    assert not compiled_in_place(torch.compile(model, backend="aot_eager"))

"""``lowtide.plan``: one call from a model to a Policy that fits."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.cost.devices import find_device
from support.hand_made_traces import llama_trace


def build() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(4)]
    return nn.Sequential(nn.Linear(64, 64), *layers), torch.randn(16, 64, 64)


def test_a_plan_of_a_live_model_can_be_applied_and_is_exact() -> None:
    model, batch = build()
    keep = lowtide.plan(model, lambda: model(batch).sum(), budget="4GiB", device="a100")
    budget = (keep.least + keep.simulation.reserved) // 2
    plan = lowtide.plan(model, lambda: model(batch).sum(), budget=budget, device="a100")
    assert plan.feasible
    assert plan.simulation.reserved <= budget < keep.simulation.reserved
    lowtide.verify(model, plan.policy, batch)


def test_a_plan_is_printed_as_one_line_and_says_that_no_optimizer_is_in_it() -> None:
    model, batch = build()
    made = lowtide.plan(model, lambda: model(batch).sum(), budget="1GiB", device="h100")
    assert repr(made).startswith("Plan(")
    assert "on h100 fits 1 GiB: " in repr(made)
    assert len(repr(made)) < 200
    assert any("optimizer" in note for note in made.notes)


def test_a_model_without_a_run_is_refused_with_what_to_give() -> None:
    model, _ = build()
    with pytest.raises(lowtide.PlanError, match=r"Sequential is planned for by running it: give run="):
        lowtide.plan(model, budget="1GiB", device="h100")


def test_the_name_means_the_function_before_and_after_the_package_is_imported() -> None:
    code = "import lowtide; assert callable(lowtide.plan); import lowtide.planner.solve; assert callable(lowtide.plan)"
    subprocess.run([sys.executable, "-c", code], check=True)


TRACE = llama_trace(2)


def test_a_budget_of_80_is_refused_as_80_bytes() -> None:
    with pytest.raises(lowtide.UnitError, match='for 80 GiB write "80GiB"'):
        lowtide.plan(TRACE, budget=80, device="h100")


def test_a_budget_is_the_devices_memory_less_what_others_are_assumed_to_take_unless_given() -> None:
    device = find_device("h100")
    made = lowtide.plan(TRACE, device="h100")
    assert made.budget == device.capacity - device.reserve.driver - device.reserve.workspace
    assert any("assumed: 1 GiB for the driver, 64 MiB for workspaces" in note for note in made.notes)
    assert lowtide.plan(TRACE, device="h100", budget="14G").budget == 14 << 30
    kept_back = lowtide.plan(TRACE, device="h100", reserve="3GiB")
    assert kept_back.budget == device.capacity - (3 << 30)
    assert any("less a reserve of 3 GiB, which was given" in note for note in kept_back.notes)


def test_a_reserve_that_cannot_be_meant_is_refused() -> None:
    with pytest.raises(lowtide.PlanError, match="give one of them"):
        lowtide.plan(TRACE, device="h100", budget="14G", reserve="3GiB")
    with pytest.raises(lowtide.PlanError, match=r"nothing is left of the 79.1 GiB of h100: 90 GiB are reserved"):
        lowtide.plan(TRACE, device="h100", reserve="90GiB")
    with pytest.raises(lowtide.UnitError, match='a reserve of 3 is 3 bytes; for 3 GiB write "3GiB"'):
        lowtide.plan(TRACE, device="h100", reserve=3)


def test_nothing_fits_raises_with_the_plan_unless_asked_not_to() -> None:
    with pytest.raises(lowtide.InfeasibleError, match="nothing fits 2 MiB: the least that works is") as raised:
        lowtide.plan(TRACE, device="h100", budget="2MiB")
    assert isinstance(raised.value, lowtide.PlanError)
    assert not raised.value.plan.feasible
    plan = lowtide.plan(TRACE, device="h100", budget="2MiB", must_fit=False)
    assert plan.policy == raised.value.plan.policy
    assert lowtide.plan(TRACE, device="h100", budget=plan.least).feasible


def test_torchs_device_is_looked_up_or_named() -> None:
    assert lowtide.plan(TRACE, device=torch.device("cpu")).device == "cpu"
    for device in ("cuda", "cuda:0", torch.device("cuda")):
        if torch.cuda.is_available():
            continue
        with pytest.raises(lowtide.PlanError, match="means the one of this machine, which has none: give one of a100"):
            lowtide.plan(TRACE, device=device)
    with pytest.raises(lowtide.PlanError, match=r"a device is a name .* found 3"):
        lowtide.plan(TRACE, device=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda loss: loss,
        lambda loss: SimpleNamespace(loss=loss, logits=None),
        pytest.param(lambda loss: {"loss": loss}, marks=pytest.mark.slow),
        pytest.param(lambda loss: (loss, "more"), marks=pytest.mark.slow),
        lambda loss: loss.reshape(1),
    ],
)
def test_what_has_the_loss_is_understood(wrapped: Callable[[Any], Any]) -> None:
    model, batch = build()
    plan = lowtide.plan(model, lambda: wrapped(model(batch).sum()), budget="4GiB", device="a100")
    assert plan.feasible
    assert (plan.workload.samples, plan.workload.sequence) == (16, 64)
    assert plan.tokens_per_second == pytest.approx(16 * 64 / plan.simulation.seconds)


@pytest.mark.parametrize(
    ("wrapped", "words"),
    [
        (lambda output: output, r"a tensor of shape \(16, 64, 64\)"),
        (lambda output: output.sum().detach(), r"a tensor of shape \(\) that requires no gradient"),
        (lambda output: SimpleNamespace(loss=None), "a SimpleNamespace without a loss"),
        (lambda output: (output, 1), r"a tuple that begins with a tensor of shape"),
        (lambda output: None, "nothing: it has no return"),
    ],
)
def test_what_is_no_loss_is_named(wrapped: Callable[[Any], Any], words: str) -> None:
    model, batch = build()
    with pytest.raises(lowtide.TraceError, match=rf"run\(\) returned {words}.*; expected the loss"):
        lowtide.plan(model, lambda: wrapped(model(batch)), budget="4GiB", device="a100")


@pytest.mark.parametrize("model", ["llama3-8b", 3])
def test_what_is_no_model_is_named(model: Any) -> None:
    with pytest.raises(lowtide.PlanError, match=f"a {type(model).__name__} cannot be planned for"):
        lowtide.plan(model, lambda: None, device="h100")


def test_a_stack_that_is_not_covered_is_a_warning_and_a_note_and_layers_chooses() -> None:
    model = nn.Transformer(32, 2, 2, 3, 64, batch_first=True)
    batch = torch.randn(2, 16, 32)

    def run() -> torch.Tensor:
        loss: torch.Tensor = model(batch, batch).sum()
        return loss

    with pytest.warns(UserWarning, match=r"the 2 layers in encoder\.layers .* hold .* layers='encoder\.layers'"):
        plan = lowtide.plan(model, run, device="h100")
    assert len(plan.policy.layers) == 3
    assert any(note.startswith("not covered: the 2 layers in encoder.layers") for note in plan.notes)
    with pytest.warns(UserWarning, match=r"the 3 layers in decoder\.layers"):
        other = lowtide.plan(model, run, device="h100", layers="encoder.layers")
    assert len(other.policy.layers) == 2


def test_a_model_of_one_stack_warns_of_nothing() -> None:
    model, batch = build()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowtide.plan(model, lambda: model(batch).sum(), device="h100")

"""``lowtide.plan``: one call from a model to a Policy that fits."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import lowtide


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


def test_a_model_without_a_run_is_refused_with_what_to_give() -> None:
    model, _ = build()
    with pytest.raises(lowtide.PlanError, match=r"Sequential is planned for by running it: give run="):
        lowtide.plan(model, budget="1GiB", device="h100")


def test_the_name_means_the_function_before_and_after_the_package_is_imported() -> None:
    code = "import lowtide; assert callable(lowtide.plan); import lowtide.planner.solve; assert callable(lowtide.plan)"
    subprocess.run([sys.executable, "-c", code], check=True)

"""What is done where a plan fits, and where none does."""

from __future__ import annotations

import re

from lowtide import LayerPolicy, Recompute
from lowtide.adaptive.decide import Decided, Situation, decide, safe_policy
from lowtide.adaptive.settings import AdaptSettings
from lowtide.planner.cache import caches
from lowtide.planner.make import make_plan
from lowtide.planner.pipeline import even_pipeline
from lowtide.planner.simulate import simulate
from support.traced_cases import DEVICE, hand_made_trace

LAYERS = 8
TRACE = hand_made_trace(LAYERS)
LEAST = make_plan(TRACE, 1, DEVICE).least
PLENTY = 1 << 40


def decided(
    capacity: int,
    *,
    lost: int = 0,
    before: Decided | None = None,
    budget: int | None = None,
    rescued: bool = True,
) -> Decided:
    situation = Situation(
        trace=TRACE,
        device=DEVICE,
        pipeline=even_pipeline(LAYERS),
        capacity=capacity,
        lost=lost,
        before=before,
    )
    return decide(situation, AdaptSettings(budget=budget), rescued=rescued)


def test_what_fits_the_capacity_less_its_margin_is_planned() -> None:
    found = decided(PLENTY, lost=1 << 20)
    assert found.plan.feasible
    assert found.policy == found.plan.policy
    assert found.budget <= PLENTY - (1 << 20)


def test_nothing_of_a_plan_is_left_in_the_process_that_trains() -> None:
    simulate(TRACE, safe_policy(LAYERS), DEVICE)
    assert any(cache.values for cache in caches())
    decided(PLENTY)
    assert not any(cache.values for cache in caches())


def test_a_device_that_does_not_say_what_it_has_is_planned_for_without_a_budget() -> None:
    found = decided(None)
    assert not found.plan.bounded
    assert "planned without a budget" in found.reason
    assert "TiB" not in found.reason


def test_a_device_size_that_nothing_fits_is_no_capacity() -> None:
    found = decided(PLENTY, budget=LEAST // 2)
    assert found.policy is not None
    assert found.policy.layers == (LayerPolicy(Recompute()),) * LAYERS
    assert "nothing fits the device size" in found.reason


def test_a_capacity_that_nothing_fits_reports_what_is_enough_and_that_is() -> None:
    enough = re.search(r"\((\d+) bytes\) works", decided(LEAST // 2).reason)
    assert enough is not None
    assert decided(int(enough[1])).plan.feasible


def test_what_was_missing_does_not_stop_a_run_that_fits() -> None:
    enough = LEAST + (4 << 20)
    found = decided(enough, lost=enough // 2)
    assert not found.plan.feasible
    assert found.policy == found.plan.policy
    assert found.scarce
    assert "what was missing" in found.reason


def test_a_run_that_survived_so_far_goes_on_with_what_takes_least() -> None:
    before = decided(LEAST + (4 << 20))
    assert before.plan.feasible
    assert not before.scarce
    found = decided(LEAST // 2, lost=1, before=before)
    assert found.scarce
    assert found.policy is not None
    assert found.plan.simulation.reserved <= before.plan.simulation.reserved
    one_that_takes_more = decided(PLENTY)
    found = decided(LEAST // 2, lost=1, before=one_that_takes_more)
    assert found.policy != one_that_takes_more.policy


def test_a_run_that_nothing_fits_goes_on_as_far_as_it_can() -> None:
    found = decided(LEAST // 2)
    assert found.policy is None
    assert "tensors are offloaded on OOM" in found.reason
    found = decided(LEAST // 2, rescued=False)
    assert found.policy is not None
    assert found.policy.layers == (LayerPolicy(Recompute()),) * LAYERS
    assert "every layer is recomputed" in found.reason

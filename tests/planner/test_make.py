"""The one call: what it returns fits, and nothing simple that fits is faster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide.errors import PlanError
from lowtide.planner.allocator import Limit, LimitError
from lowtide.planner.make import make_plan
from lowtide.planner.pipeline import even_pipeline
from lowtide.planner.simple import simple_policies
from lowtide.planner.simulate import simulate
from lowtide.policy import LayerPolicy, Pattern, Policy, Recompute, Rule, Swap, resolve
from support.hand_made_traces import DEVICE, llama_trace

TRACE = llama_trace(8)
KEPT = simulate(TRACE, Policy((LayerPolicy(),) * 8), DEVICE)
FULL = simulate(TRACE, Policy((LayerPolicy(default=Recompute()),) * 8), DEVICE)


@pytest.mark.parametrize("share", [0.3, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.05, 0.6, 0.9))])
def test_a_plan_fits_and_nothing_simple_that_fits_is_faster(share: float) -> None:
    budget = round(FULL.reserved + share * (KEPT.reserved - FULL.reserved))
    plan = make_plan(TRACE, budget, DEVICE)
    assert plan.feasible
    assert simulate(TRACE, plan.policy, DEVICE).reserved <= budget
    assert plan.simulation.reserved <= budget
    for simple in simple_policies(8):
        other = simulate(TRACE, simple.policy, DEVICE)
        assert other.reserved > budget or other.seconds >= plan.simulation.seconds
    assert KEPT.seconds <= plan.bound <= plan.simulation.seconds < FULL.seconds
    assert plan.gap == pytest.approx(plan.simulation.seconds / plan.bound - 1)
    assert resolve(plan.policy, TRACE.catalogue).unused == ()


def test_with_memory_for_everything_everything_is_kept() -> None:
    plan = make_plan(TRACE, KEPT.reserved, DEVICE)
    assert plan.policy.layers == (LayerPolicy(),) * 8
    assert plan.gap == 0


@pytest.mark.slow
def test_half_of_the_memory_wins_back_most_of_the_time() -> None:
    budget = (FULL.reserved + KEPT.reserved) // 2
    alone = make_plan(TRACE, budget, DEVICE, swap=False)
    both = make_plan(TRACE, budget, DEVICE)
    lost = FULL.seconds - KEPT.seconds
    assert 1 - (alone.simulation.seconds - KEPT.seconds) / lost > 0.6
    assert both.simulation.seconds < alone.simulation.seconds
    assert alone.simulation.stages[0].moved == 0 < both.simulation.stages[0].moved


def test_what_does_not_fit_says_what_is_needed_and_what_is_in_the_way() -> None:
    plan = make_plan(TRACE, FULL.reserved // 2, DEVICE)
    assert not plan.feasible
    assert FULL.reserved // 2 < plan.least <= FULL.reserved
    assert plan.notes[0].startswith("nothing fits")
    assert make_plan(TRACE, plan.least, DEVICE).feasible
    assert not make_plan(TRACE, plan.simulation.peak, DEVICE).feasible


def test_where_nothing_fits_cached_memory_is_given_back_and_the_plan_says_so() -> None:
    least = make_plan(TRACE, FULL.reserved // 2, DEVICE).least
    easy, budget = make_plan(TRACE, least, DEVICE), least - (64 << 20)
    assert easy.simulation.retries == 0
    plan = make_plan(TRACE, budget, DEVICE)
    assert plan.feasible
    assert plan.simulation.retries > 0
    assert plan.simulation.reserved <= budget < simulate(TRACE, plan.policy, DEVICE).reserved
    assert plan.simulation == simulate(TRACE, plan.policy, DEVICE, details=True, limit=Limit(budget))
    assert plan.notes[0].startswith("it fits only because cached memory is given back to the device")
    with pytest.raises(LimitError):
        simulate(TRACE, plan.policy, DEVICE, limit=Limit(budget, gives_back=False))


def test_giving_memory_back_waits_for_the_device() -> None:
    policy = Policy((LayerPolicy(default=Recompute()),) * 8)
    tight = simulate(TRACE, policy, DEVICE, limit=Limit(FULL.reserved - (64 << 20)))
    assert tight.retries > 0
    assert tight.seconds > FULL.seconds


def test_expandable_segments_reserve_less_and_the_plan_says_what_to_set() -> None:
    device = replace(DEVICE, expandable_segments=True)
    for policy, plain in ((LayerPolicy(), KEPT), (LayerPolicy(default=Recompute()), FULL)):
        grown = simulate(TRACE, Policy((policy,) * 8), device)
        assert grown.peak <= plain.peak
        assert grown.peak <= grown.reserved < plain.reserved
        assert grown.seconds == plain.seconds
    plan = make_plan(TRACE, FULL.reserved, device)
    assert plan.simulation.reserved <= FULL.reserved
    assert any("PYTORCH_ALLOC_CONF=expandable_segments:True" in note for note in plan.notes)
    assert not any("expandable" in note for note in make_plan(TRACE, KEPT.reserved, DEVICE).notes)


def test_recompute_or_swap_can_be_left_out() -> None:
    budget = (FULL.reserved + 3 * KEPT.reserved) // 4
    swapped = make_plan(TRACE, budget, replace(DEVICE, link_out=2e11, link_in=2e11), recompute=False)
    decisions = [rule.decision for layer in swapped.policy.layers for rule in layer.rules]
    assert swapped.feasible
    assert decisions
    assert all(isinstance(decision, Swap) for decision in decisions)


@pytest.mark.slow
def test_what_is_fixed_is_respected() -> None:
    rule = Rule(Pattern("feed_forward.silu"), Recompute())
    fixed = Policy((LayerPolicy(rules=(rule,)),) * 8)
    plan = make_plan(TRACE, KEPT.reserved, DEVICE, fixed=fixed)
    assert all(
        layer.decisions["feed_forward.silu"] == Recompute() for layer in resolve(plan.policy, TRACE.catalogue).layers
    )
    tight = make_plan(TRACE, (FULL.reserved + KEPT.reserved) // 2, DEVICE, fixed=fixed)
    assert tight.feasible
    assert all(
        layer.decisions["feed_forward.silu"] == Recompute() for layer in resolve(tight.policy, TRACE.catalogue).layers
    )


def test_every_stage_of_a_pipeline_fits_and_earlier_ones_recompute_more() -> None:
    pipeline = even_pipeline(8, stages=4, micro_batches=8)
    kept = simulate(TRACE, Policy((LayerPolicy(),) * 8), DEVICE, pipeline)
    full = simulate(TRACE, Policy((LayerPolicy(default=Recompute()),) * 8), DEVICE, pipeline)
    budget = (kept.reserved + full.reserved) // 2
    plan = make_plan(TRACE, budget, DEVICE, pipeline, swap=False)
    assert plan.feasible
    assert all(stage.reserved <= budget for stage in plan.simulation.stages)
    assert plan.simulation.seconds < full.seconds
    recompute = [stage.recompute for stage in plan.simulation.stages]
    assert recompute[0] >= recompute[1] >= recompute[2]
    assert recompute[0] > 0


@pytest.mark.slow
def test_the_same_question_has_the_same_answer() -> None:
    budget = (FULL.reserved + KEPT.reserved) // 2
    one, other = make_plan(TRACE, budget, DEVICE), make_plan(TRACE, budget, DEVICE)
    assert one.policy.digest == other.policy.digest


def test_the_curve_falls_with_memory() -> None:
    curve = make_plan(TRACE, KEPT.reserved, DEVICE).curve
    assert len(curve) > 5
    assert [point[0] for point in curve] == sorted(point[0] for point in curve)
    assert [point[1] for point in curve] == sorted((point[1] for point in curve), reverse=True)
    assert curve[-1][1] == pytest.approx(KEPT.seconds, rel=1e-3)


def test_no_budget_is_an_error() -> None:
    with pytest.raises(PlanError, match="60GiB"):
        make_plan(TRACE, 0, DEVICE)


def test_fixed_decisions_may_be_uniform() -> None:
    fixed = Policy.uniform(default=Recompute())
    plan = make_plan(TRACE, KEPT.reserved, DEVICE, fixed=fixed)
    assert plan.policy.layers == make_plan(TRACE, KEPT.reserved, DEVICE, fixed=fixed.for_layers(8)).policy.layers
    assert len(plan.policy.layers) == 8

"""Plans are made faster with the simulator as the judge."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from lowtide import LayerPolicy, Pattern, Policy, Recompute, Rule, Swap
from lowtide.cost.devices import find_device
from lowtide.cost.kernel import kernel_seconds
from lowtide.models.shape import DecoderShape
from lowtide.planner.polish import Judged, Polisher
from lowtide.planner.problem import layer_cost
from lowtide.planner.simulate import simulate
from lowtide.trace.trace import Trace
from lowtide.train.traced import TracedRank, trace_rank

DEVICE = find_device("h100")
SHAPE = DecoderShape(
    vocab_size=1000,
    hidden_size=1024,
    num_layers=6,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=2816,
)


@cache
def traced_llama() -> Trace:
    return trace_rank(TracedRank(shape=SHAPE, samples=4, sequence=1024, optimizer="none"))


@cache
def judge(policy: Policy) -> Judged:
    simulation = simulate(traced_llama(), policy, DEVICE)
    return Judged(simulation.seconds, simulation.reserved, simulation.stages[0].stall)


def polisher(budget: int) -> Polisher:
    trace = traced_llama()
    costs = [layer_cost(part, lambda kernel: kernel_seconds(DEVICE, kernel)) for part in trace.parts]
    return Polisher(trace, costs, judge, budget)


def everywhere(layer: LayerPolicy) -> Policy:
    return Policy((layer,) * len(traced_llama().layers), origin="solver")


@pytest.fixture(params=[0.1, 0.5, 0.9])
def budget(request: pytest.FixtureRequest) -> int:
    least, most = judge(everywhere(LayerPolicy(Recompute()))).reserved, judge(everywhere(LayerPolicy())).reserved
    return int(least + request.param * (most - least))


def test_what_is_polished_fits_and_is_faster(budget: int) -> None:
    start = everywhere(LayerPolicy(Recompute()))
    policy, judged = polisher(budget).polish(start, 60)
    assert judged == judge(policy)
    assert judged.reserved <= budget
    assert judged.seconds < judge(start).seconds


def test_polishing_ends_in_the_same_place_every_time(budget: int) -> None:
    start = everywhere(LayerPolicy(Recompute()))
    assert polisher(budget).polish(start, 60) == polisher(budget).polish(start, 60)


def test_what_does_not_fit_is_left_as_it_is() -> None:
    start = everywhere(LayerPolicy())
    policy, judged = polisher(judge(start).reserved - 1).polish(start, 60)
    assert policy == start
    assert judged.reserved == judge(start).reserved


def test_the_cheapest_operators_that_fit_are_the_fewest(budget: int) -> None:
    polishing = polisher(budget)
    policy = polishing.cheapest_first()
    assert policy is not None
    assert judge(policy).reserved <= budget < judge(everywhere(LayerPolicy())).reserved
    recomputed = {(layer, rule.pattern.text) for layer, one in enumerate(policy.layers) for rule in one.rules}
    costs = {
        again: [one.cost_per_byte for key, one in polishing.places.items() if (key in recomputed) == again]
        for again in (True, False)
    }
    assert max(costs[True]) <= min(costs[False], default=float("inf"))
    least = max(recomputed, key=lambda key: (polishing.places[key].cost_per_byte, *key))
    rules = tuple(rule for rule in policy.layers[least[0]].rules if rule.pattern.text != least[1])
    fewer = replace(
        policy,
        layers=tuple(
            replace(one, rules=rules) if layer == least[0] else one for layer, one in enumerate(policy.layers)
        ),
    )
    assert judge(fewer).reserved > budget


def test_what_did_not_fit_does_so_with_more_that_is_recomputed(budget: int) -> None:
    (name,) = {one.name for one in traced_llama().parts[0].operators if one.name.endswith("feed_forward.mul")}
    swapped = everywhere(LayerPolicy(rules=(Rule(Pattern(name), Swap(20)),)))
    policy = polisher(budget).cheapest_first(swapped)
    assert policy is not None
    assert judge(policy).reserved <= budget
    assert all(Rule(Pattern(name), Swap(20)) in layer.rules for layer in policy.layers)


def test_a_budget_for_everything_recomputes_nothing() -> None:
    most = judge(everywhere(LayerPolicy())).reserved
    policy, judged = polisher(most).polish(everywhere(LayerPolicy(Recompute())), 200)
    assert judged.seconds == pytest.approx(judge(everywhere(LayerPolicy())).seconds)
    assert all(layer == LayerPolicy() for layer in policy.layers)

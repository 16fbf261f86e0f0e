"""The solver against every possible choice, and what its model charges against what its layers really hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.planner.expand import Choice, choices_of, expand
from lowtide.planner.pipeline import even_pipeline
from lowtide.planner.problem import Case, Group, LayerCost, StageProblem, layer_cost, stage_problems
from lowtide.planner.solve import StageSolution, relaxed_seconds, solve_least, solve_stage
from lowtide.policy import LayerPolicy, Pattern, Policy, Recompute, Rule, Swap, resolve
from support.hand_made_traces import DEVICE, Step, llama_trace, made_part, roofline

MIB = 1 << 20


def problem_of(cost: LayerCost, layers: int, in_flight: int = 1) -> StageProblem:
    """A stage of one group, with links wide enough for half of what it saves."""
    forward = layers * cost.forward
    return StageProblem(
        stage=0,
        groups=(Group(0, tuple(range(layers)), cost, {}),),
        cases=(Case((in_flight,), 0, 0, 0, rebuilding=False),),
        micro_batches=1,
        forward=forward,
        backward=2 * forward,
        link_out=max(1.0, layers * cost.saved / forward / 2),
        link_in=max(1.0, layers * cost.saved / forward / 2),
        copy_latency=0.0,
        host=1 << 50,
        overlap=False,
    )


def held(choice: Choice) -> int:
    """What a layer holds, said again and otherwise than in the solver."""
    cost = choice.cost
    swapped_input = choice.operators.get("") == "swap"
    if choice.whole:
        return 0 if swapped_input else cost.given
    total = cost.fixed + (0 if swapped_input else cost.boundary)
    total += sum(one.held for one in cost.operators if one.name not in choice.operators)
    again = {name for name, what in choice.operators.items() if what == "recompute"}
    for storage in cost.inputs:
        rebuilt = storage.owner is not None and cost.operators[storage.owner].name in again
        if not rebuilt and any(cost.operators[reader].name in again for reader in storage.readers):
            total += storage.size
    return total


def extra(choice: Choice) -> float:
    if choice.whole:
        return choice.cost.again
    again = {name for name, what in choice.operators.items() if what == "recompute"}
    return sum(one.seconds for one in choice.cost.operators if one.name in again)


def every_choice(cost: LayerCost) -> Iterator[Choice]:
    """Every way to keep and recompute in one layer."""
    yield Choice(cost, whole=True)
    names = [one.name for one in cost.operators if one.repeatable]
    for decisions in product((False, True), repeat=len(names)):
        yield Choice(cost, operators={name: "recompute" for name, on in zip(names, decisions, strict=True) if on})


sizes = st.integers(1, 40).map(lambda number: number * MIB)


@st.composite
def small_layers(draw: st.DrawFn) -> LayerCost:
    """A layer of four operators, each of which reads one or two values before it and saves some of them."""
    steps: list[Step] = []
    for number in range(4):
        before = ["input", *(step.name for step in steps)]
        reads = tuple(draw(st.lists(st.sampled_from(before), min_size=1, max_size=2, unique=True)))
        if steps and steps[-1].name not in reads:
            reads = (*reads, steps[-1].name)  # every value is read
        candidates = (*reads, f"op{number}")
        saves = tuple(name for name in candidates if draw(st.booleans()))
        flops = draw(st.integers(1, 50)) * 10**10
        steps.append(Step(f"op{number}", reads, draw(sizes), saves, flops, repeatable=draw(st.integers(0, 4)) > 0))
    return layer_cost(made_part("Layer", steps, draw(sizes)), roofline)


@settings(max_examples=20, deadline=None)
@given(cost=small_layers(), layers=st.integers(1, 3), share=st.floats(0, 1))
def test_no_choice_of_layers_within_the_budget_is_faster(cost: LayerCost, layers: int, share: float) -> None:
    choices = list({(held(one), extra(one)): one for one in every_choice(cost)}.values())
    combinations: list[Sequence[Choice]] = list(combinations_with_replacement(choices, layers))
    memories = [sum(map(held, one)) for one in combinations]
    budget = round(min(memories) + share * (layers * cost.saved - min(memories))) + 1024
    problem = problem_of(cost, layers)
    fastest = min(sum(map(extra, one)) for one, memory in zip(combinations, memories, strict=True) if memory <= budget)
    solution = solve_stage(problem, budget, swap=False)
    assert solution is not None
    found = solution.seconds - problem.seconds
    assert found >= fastest - 1e-9
    assert found <= fastest + 1e-3 * problem.seconds
    assert solution.bound - problem.seconds <= fastest + 1e-9


@settings(max_examples=20, deadline=None)
@given(cost=small_layers(), layers=st.integers(1, 5), share=st.floats(0, 1), swap=st.booleans())
def test_layers_hold_and_take_what_the_counts_say(cost: LayerCost, layers: int, share: float, swap: bool) -> None:
    problem = problem_of(cost, layers)
    least = solve_least(problem, swap=swap)
    budget = round(least.memory + share * (layers * cost.saved - least.memory)) + 1024
    solution = solve_stage(problem, budget, swap=swap)
    assert solution is not None
    choices = choices_of(solution.groups)
    assert sorted(choices) == list(range(layers))
    assert sum(map(held, choices.values())) == pytest.approx(solution.memory, abs=layers * 64)
    assert solution.memory <= budget + 64
    waits = max(0.0, solution.moved / problem.link_out - problem.forward)
    waits += max(0.0, solution.moved / problem.link_in - (layers - 1) * cost.backward)
    assert problem.seconds + sum(map(extra, choices.values())) + waits == pytest.approx(solution.seconds)
    assert solution.moved == pytest.approx(
        sum(one.moved if not one.whole else cost.given * ("" in one.operators) for one in choices.values())
    )


def test_more_memory_is_never_slower_and_fractions_are_never_slower_than_counts() -> None:
    problem = stage_problems(llama_trace(), DEVICE, even_pipeline(8), roofline)[0]
    least = solve_least(problem).memory
    before = float("inf")
    for budget in range(least + MIB, least + 1300 * MIB, 100 * MIB):
        solution, relaxed = solve_stage(problem, budget), relaxed_seconds(problem, budget)
        assert solution is not None
        assert relaxed is not None
        assert solution.memory <= budget
        assert relaxed <= solution.seconds * (1 + 1e-5)
        assert solution.bound <= solution.seconds <= before * (1 + 1e-3)
        before = solution.seconds


def test_swap_is_used_where_the_link_has_time_and_wins_time() -> None:
    problem = stage_problems(llama_trace(), DEVICE, even_pipeline(8), roofline)[0]
    budget = solve_least(problem).memory + 200 * MIB
    without, with_swap = solve_stage(problem, budget, swap=False), solve_stage(problem, budget)
    assert without is not None
    assert with_swap is not None
    assert without.moved == 0 < with_swap.moved
    assert with_swap.seconds < without.seconds
    assert with_swap.moved / problem.link_out <= problem.forward


def test_where_nothing_may_be_recomputed_the_computation_waits_for_the_link() -> None:
    problem = stage_problems(llama_trace(), DEVICE, even_pipeline(8), roofline)[0]
    solution = solve_stage(problem, solve_least(problem).memory + 200 * MIB, recompute=False)
    assert solution is not None
    wait = solution.moved / problem.link_out - problem.forward
    assert wait > 0
    assert solution.seconds >= problem.seconds + wait


def test_too_little_memory_is_no_solution() -> None:
    problem = stage_problems(llama_trace(), DEVICE, even_pipeline(8), roofline)[0]
    assert solve_stage(problem, solve_least(problem).memory - MIB) is None


def test_a_stage_with_more_micro_batches_in_flight_recomputes_more() -> None:
    problems = stage_problems(llama_trace(), DEVICE, even_pipeline(8, stages=4, micro_batches=8), roofline)
    budget = solve_least(problems[0]).memory + 100 * MIB
    extras = []
    for problem in problems[:3]:  # the last has the head
        solution = solve_stage(problem, budget, swap=False)
        assert solution is not None
        extras.append(solution.seconds - problem.seconds)
    assert extras == sorted(extras, reverse=True)
    assert extras[0] > extras[2] > 0


def test_an_operator_that_cannot_be_replayed_is_never_recomputed() -> None:
    part = made_part(
        "Layer",
        [
            Step("random", ("input",), 8 * MIB, ("random",), 10**9, repeatable=False),
            Step("last", ("random",), 8 * MIB, ("random",), 10**9),
        ],
        8 * MIB,
    )
    solution = solve_least(problem_of(layer_cost(part, roofline), 4), swap=False)
    assert solution.groups[0].recomputed.get("random", 0) == 0


def test_what_is_decided_already_stays() -> None:
    trace = llama_trace(4)
    name = "feed_forward.silu"
    fixed = Policy(
        (
            LayerPolicy(rules=(Rule(Pattern(name), Swap(7)),)),
            LayerPolicy(default=Recompute()),
            LayerPolicy(rules=(Rule(Pattern(name), Recompute()),)),
            LayerPolicy(),
        ),
        origin="solver",
    )
    problems = stage_problems(trace, DEVICE, even_pipeline(4), roofline, fixed=resolve(fixed, trace.catalogue))
    solution = solve_stage(problems[0], 1 << 40)
    assert solution is not None
    policy = expand(problems, [solution], 4)
    layers = resolve(policy, trace.catalogue).layers
    assert layers[0].decisions[name] == Swap(7)
    assert policy.layers[1] == LayerPolicy(default=Recompute())
    assert layers[2].decisions[name] == Recompute()
    assert policy.layers[3] == LayerPolicy()


def test_the_host_memory_bounds_what_is_swapped() -> None:
    problem = stage_problems(llama_trace(), DEVICE, even_pipeline(8), roofline, host_memory=64 * MIB)[0]
    solution = solve_stage(problem, solve_least(problem).memory + 200 * MIB)
    assert solution is not None
    assert 0 < solution.moved <= 64 * MIB


def test_equal_layers_share_one_policy_and_every_rule_has_an_effect() -> None:
    trace = llama_trace(16)
    problems = stage_problems(trace, DEVICE, even_pipeline(16), roofline)
    least = solve_least(problems[0]).memory
    for room in (50, 300, 900):
        solution = solve_stage(problems[0], least + room * MIB)
        assert solution is not None
        policy = expand(problems, [solution], 16)
        assert policy.origin == "solver"
        assert len({id(layer) for layer in policy.layers}) == len(set(policy.layers))
        assert resolve(policy, trace.catalogue).unused == ()
        assert _counts(policy) == _expected(solution)


def _counts(policy: Policy) -> Mapping[str, int]:
    counts: dict[str, int] = {}
    for layer in policy.layers:
        for rule in layer.rules:
            if isinstance(rule.decision, Recompute):
                counts[rule.pattern.text] = counts.get(rule.pattern.text, 0) + 1
    return counts


def _expected(solution: StageSolution) -> Mapping[str, int]:
    total: Counter[str] = Counter()
    for counts in solution.groups:
        total.update(counts.recomputed)
    return {name: count for name, count in total.items() if count}


def test_a_copy_comes_back_before_it_is_needed() -> None:
    """A longer copy is reloaded further ahead."""
    trace = llama_trace(8)
    problems = stage_problems(trace, DEVICE, even_pipeline(8), roofline)
    solution = solve_stage(problems[0], solve_least(problems[0]).memory + 300 * MIB)
    assert solution is not None
    fast = [replace(one, link_out=8 * one.link_out, link_in=8 * one.link_in) for one in problems]

    def furthest(policy: Policy) -> int:
        return max(
            rule.decision.prefetch for layer in policy.layers for rule in layer.rules if isinstance(rule.decision, Swap)
        )

    assert furthest(expand(fast, [solution], 8)) < furthest(expand(problems, [solution], 8))

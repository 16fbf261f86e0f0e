"""A Policy as YAML, read back: every operator has the same decision, or the difference is reported."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.config.check import check_text
from lowtide.planner.expand import expand
from lowtide.planner.pipeline import Pipeline, ScheduleName, even_pipeline
from lowtide.planner.problem import stage_problems
from lowtide.planner.solve import solve_least, solve_stage
from lowtide.planner.yaml_form import yaml_form
from lowtide.policy import Catalogue, Keep, LayerPolicy, Operator, Pattern, Policy, Recompute, Rule, Swap, resolve
from support.hand_made_traces import DEVICE, Step, llama_trace, made_part, roofline

MIB = 1 << 20
TRACE = llama_trace(8)
NAMES = [one.name for one in TRACE.parts[0].operators]


def decisions(policy: Policy, catalogue: Catalogue = TRACE.catalogue) -> list[object]:
    return [(layer.boundary, dict(layer.decisions)) for layer in resolve(policy, catalogue).layers]


def read_back(text: str) -> Policy:
    check = check_text(text)
    check.raise_errors()
    assert check.policy is not None
    return check.policy


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("room", [60, 300, 700])
def test_what_the_solver_recomputes_is_read_back_the_same(stages: int, room: int) -> None:
    pipeline = even_pipeline(8, stages=stages, micro_batches=8)
    problems = stage_problems(TRACE, DEVICE, pipeline, roofline)
    solutions = [
        solve_stage(problem, solve_least(problem, swap=False).memory + room * MIB, swap=False) for problem in problems
    ]
    policy = expand(problems, [solution for solution in solutions if solution is not None], 8)
    written = yaml_form(policy, TRACE.catalogue, pipeline)
    assert written.lost == ()
    assert decisions(read_back(written.text)) == decisions(policy)


def test_first_layers_of_each_stage_are_counted() -> None:
    whole, some = LayerPolicy(default=Recompute()), LayerPolicy(rules=(Rule(Pattern("feed_forward.mul"), Recompute()),))
    policy = Policy((whole, some, LayerPolicy(), LayerPolicy(), some, LayerPolicy(), LayerPolicy(), LayerPolicy()))
    written = yaml_form(policy, TRACE.catalogue, even_pipeline(8, stages=2, micro_batches=4))
    assert written.lost == ()
    assert "swap_config" not in written.text
    assert "recompute:\n  - [1, 0]\n" in written.text
    assert "mul:\n    - [2, 1]\n" in written.text
    assert decisions(read_back(written.text)) == decisions(policy)


layer_policies = st.one_of(
    st.just(LayerPolicy()),
    st.just(LayerPolicy(default=Recompute())),
    st.dictionaries(
        st.sampled_from(NAMES), st.one_of(st.just(Recompute()), st.integers(1, 40).map(Swap)), max_size=5
    ).map(lambda chosen: LayerPolicy(rules=tuple(Rule(Pattern(name), what) for name, what in chosen.items()))),
    st.just(LayerPolicy(boundary=Swap(3))),
)


@settings(max_examples=60, deadline=None)
@given(
    layers=st.lists(layer_policies, min_size=8, max_size=8),
    pipeline=st.sampled_from(
        [
            even_pipeline(8),
            even_pipeline(8, stages=2, chunks=2, micro_batches=4),
            even_pipeline(8, stages=3, micro_batches=4),
            even_pipeline(8, stages=2, chunks=2, micro_batches=4, schedule="zero_bubble_v"),
        ]
    ),
)
def test_every_decision_is_read_back_or_reported_as_lost(layers: list[LayerPolicy], pipeline: Pipeline) -> None:
    policy = Policy(tuple(layers), origin="solver")
    written = yaml_form(policy, TRACE.catalogue, pipeline)
    same = decisions(read_back(written.text)) == decisions(policy)
    assert same == (written.lost == ())


def test_the_swap_of_an_input_is_reported_as_lost() -> None:
    policy = Policy((LayerPolicy(default=Recompute(), boundary=Swap(3)),) * 8, origin="solver")
    written = yaml_form(policy, TRACE.catalogue, even_pipeline(8))
    assert written.lost == ("the layer's input is keep instead of swap(3) in layers 0-7",)


@pytest.mark.parametrize("schedule", ["zero_bubble_v", "dualpipe_v"])
def test_where_chunks_run_backwards_layers_are_listed(schedule: ScheduleName) -> None:
    pipeline = even_pipeline(8, stages=2, chunks=2, micro_batches=4, schedule=schedule)
    policy = Policy((LayerPolicy(default=Recompute()),) * 3 + (LayerPolicy(),) * 5, origin="solver")
    written = yaml_form(policy, TRACE.catalogue, pipeline)
    assert written.lost == ()
    assert "recompute: [0, 1, 2]" in written.text


def test_the_name_of_a_loop_is_no_expression() -> None:
    part = made_part("Layer", [Step("experts.linear[*]", ("input",), 64 * MIB, ("experts.linear[*]",), 10**9)], MIB)
    catalogue = Catalogue((part.catalogue, (Operator("experts.linear"),)))
    rule = Rule(Pattern(r"experts\.linear\[\*\]"), Recompute())
    policy = Policy((LayerPolicy(rules=(rule,)), LayerPolicy()), origin="solver")
    written = yaml_form(policy, catalogue, even_pipeline(2))
    assert written.lost == ()
    assert decisions(read_back(written.text), catalogue) == [
        (Keep(), {"experts.linear[*]": Recompute()}),
        (Keep(), {"experts.linear": Keep()}),
    ]

"""The search for a layout: what is considered, what is left out, and that nothing faster is."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
from typer.testing import CliRunner

from lowtide.cli.main import app
from lowtide.cost.devices import find_device
from lowtide.errors import PlanError
from lowtide.models.experts_shape import ExpertsShape
from lowtide.models.known import SHAPES
from lowtide.models.shape import DecoderShape
from lowtide.planner.plan import Plan
from lowtide.planner.simulate import simulate
from lowtide.planner.simulation import Simulation
from lowtide.policy import LayerPolicy, Pattern, Policy, Recompute, Rule
from lowtide.trace.trace import Trace
from lowtide.train.candidates import Candidate, candidates, least_memory, least_time
from lowtide.train.exports import megatron, run_yaml, torchtitan
from lowtide.train.run import Degrees, Precision
from lowtide.train.search import Asked, LeftOut, evaluate, search, size_of, traced_rank

SHAPE = DecoderShape(
    vocab_size=512, hidden_size=256, num_layers=4, num_attention_heads=4, num_key_value_heads=4, head_dim=64,
    intermediate_size=512, max_position_embeddings=512,
)  # fmt: skip
DEVICE = replace(find_device("h100"), devices_per_node=2)
ASKED = Asked(
    name="small", shape=SHAPE, device=DEVICE, budget=64 << 20, devices=4, global_batch=8, sequence=512,
    precision=Precision(parameters="float32", compute="bfloat16"),
)  # fmt: skip


def all_of(asked: Asked) -> list[Candidate]:
    return list(
        candidates(asked.shape, asked.devices, asked.global_batch, asked.sequence, asked.device.devices_per_node)
    )


@cache  # it has nothing of the budget
def kept_of(candidate: Candidate) -> tuple[Trace, Simulation]:
    return kept_as_asked(ASKED, candidate)


def kept_as_asked(asked: Asked, candidate: Candidate) -> tuple[Trace, Simulation]:
    """The Trace of a layout, and the step that keeps everything."""
    trace = traced_rank(asked, candidate)
    layers = len(trace.layers)
    return trace, simulate(trace, Policy((LayerPolicy(),) * layers), asked.device, candidate.pipeline(layers))


@pytest.mark.slow
def test_without_a_budget_each_layout_gets_what_its_process_groups_leave() -> None:
    asked = replace(ASKED, budget=None)
    assert asked.most == DEVICE.capacity - DEVICE.reserve.total()
    assert replace(asked, reserve=1 << 30).most == DEVICE.capacity - (1 << 30)
    budgets = set()
    for candidate in all_of(asked)[::5]:
        plan = evaluate(asked, candidate).outcome
        assert isinstance(plan, Plan)
        degrees = candidate.degrees
        budgets.add(plan.budget)
        many = sum(degree > 1 for degree in (degrees.data, degrees.tensor, degrees.pipeline))
        assert plan.budget <= asked.most - many * DEVICE.reserve.communication
    assert len(budgets) > 1


def test_every_layout_has_all_devices_and_all_samples() -> None:
    found = all_of(ASKED)
    assert len(found) == len(set(found)) > 10
    for one in found:
        assert one.degrees.world == 4
        assert one.degrees.data * one.samples * one.micro_batches == 8
        assert one.degrees.tensor <= 2
    assert {one.degrees.pipeline for one in found} == {1, 2, 4}
    assert any(one.chunks == 2 for one in found)
    assert any(one.degrees.replicate == 2 for one in found)


def test_long_samples_are_split_over_ranks_too() -> None:
    shape = replace(SHAPE, max_position_embeddings=32768)
    found = list(candidates(shape, 8, 8, 32768, 8))
    assert {one.degrees.context for one in found} == {1, 2, 4}
    assert all(one.degrees.world == 8 for one in found)
    assert all(one.degrees.data * one.samples * one.micro_batches == 8 for one in found)
    split = Candidate(degrees=Degrees(context=2, shard=2), samples=1, micro_batches=4)
    asked = replace(ASKED, budget=8 << 30)
    plan = evaluate(asked, split).outcome
    assert isinstance(plan, Plan)
    assert least_time(split, size_of(SHAPE), SHAPE, DEVICE, "bfloat16", 512) <= plan.simulation.seconds
    assert least_memory(split, size_of(SHAPE)) <= plan.simulation.reserved
    assert str(split) == "cp 2, fsdp 2, 4 x 1"
    assert "--context-parallel-size 2" in megatron(split, plan.policy, 8, 512, 4).flags
    assert "--parallelism.context_parallel_degree=2" in torchtitan(split, plan.policy, 8, 512).flags
    assert "  context_parallel: 2\n" in run_yaml(split, 512)


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (6, 12, 18))])
def test_what_a_layout_takes_at_least_is_less_than_what_its_plans_take(first: int) -> None:
    size = size_of(SHAPE)
    roomy = replace(ASKED, budget=8 << 30)
    for candidate in all_of(ASKED)[first::24]:
        plan = evaluate(roomy, candidate, trace=kept_of(candidate)[0]).outcome
        assert isinstance(plan, Plan)
        assert least_time(candidate, size, SHAPE, DEVICE, "bfloat16", 512) <= plan.simulation.seconds
        assert least_memory(candidate, size) <= plan.simulation.reserved


@pytest.mark.parametrize(
    ("degrees", "share"),
    [
        (Degrees(shard=4), 0.3),  # gathered over the network, in forward and in backward
        pytest.param(Degrees(shard=2, tensor=2, sequence_parallel=True), 0.3, marks=pytest.mark.slow),
        pytest.param(Degrees(shard=4, expert=2), 0.3, marks=pytest.mark.slow),
        (Degrees(shard=2, pipeline=2, expert=2), 0.05),  # tokens are exchanged
    ],
)
def test_communication_that_nothing_hides_is_part_of_what_a_layout_takes_at_least(
    degrees: Degrees, share: float
) -> None:
    shape = replace(SHAPE, experts=ExpertsShape(count=8, chosen=2, intermediate_size=256, first_dense=1))
    asked = replace(ASKED, shape=shape, device=replace(DEVICE, network=2e9))
    candidate = Candidate(degrees=degrees, samples=1, micro_batches=8 // degrees.data)
    least = least_time(candidate, size_of(shape), shape, asked.device, "bfloat16", 512)
    assert share < least / kept_as_asked(asked, candidate)[1].seconds <= 1


@pytest.mark.slow
def test_the_fastest_of_all_layouts_is_found() -> None:
    few = replace(ASKED, devices=2, global_batch=4)
    searched = search(few, workers=1)
    assert searched.proved
    plans = [evaluate(few, one).outcome for one in all_of(few)]
    best = min(one.simulation.seconds for one in plans if isinstance(one, Plan))
    assert searched.found[0].seconds <= best * (1 + 1e-9)
    assert len(searched.found) + len(searched.left_out) == len(plans)


def test_layouts_that_differ_in_virtual_stages_have_the_same_trace_and_a_known_one_is_used() -> None:
    one = next(candidate for candidate in all_of(ASKED) if candidate.degrees.pipeline == 2)
    other = next(
        candidate for candidate in all_of(ASKED) if candidate.chunks > 1 and candidate.traced_as == one.traced_as
    )
    trace = traced_rank(ASKED, one)
    assert traced_rank(ASKED, other) == trace
    first = evaluate(ASKED, other)
    again = evaluate(ASKED, other, trace=trace)
    assert first.trace == trace
    assert again.trace is None
    assert isinstance(first.outcome, Plan)
    assert isinstance(again.outcome, Plan)
    assert (again.outcome.policy, again.outcome.simulation) == (first.outcome.policy, first.outcome.simulation)


@pytest.mark.slow
def test_a_brief_plan_is_the_plan_without_what_a_report_shows() -> None:
    tight = replace(ASKED, budget=40 << 20)
    for candidate in all_of(tight)[::9]:
        trace, kept = kept_of(candidate)
        brief = evaluate(tight, candidate, trace=trace, kept=kept).outcome
        full = evaluate(tight, candidate, trace=trace, brief=False).outcome
        assert type(brief) is type(full)
        if isinstance(brief, Plan) and isinstance(full, Plan):
            assert brief.simulation.seconds >= full.simulation.seconds >= kept.seconds
            assert brief.simulation.reserved <= tight.budget
            assert (brief.bound, brief.curve, brief.simulation.stages[0].memory) == (None, (), ())
            assert full.bound is not None


@pytest.mark.parametrize(
    ("first", "every"), [(0, 36), *(pytest.param(first, 18, marks=pytest.mark.slow) for first in (0, 9))]
)
def test_what_is_known_of_a_layout_before_its_plan_is_a_bound(first: int, every: int) -> None:
    impossible = planned = 0
    for candidate in all_of(ASKED)[first::every]:
        trace, kept = kept_of(candidate)
        for share in (0.3, 0.9):
            tight = replace(ASKED, budget=int(share * kept.reserved))
            before = evaluate(tight, candidate, trace=trace, plan=False)
            plan = evaluate(tight, candidate, trace=trace).outcome
            if isinstance(before.outcome, LeftOut):
                impossible += 1
                assert isinstance(plan, LeftOut)
            elif isinstance(plan, Plan):
                assert kept.seconds <= before.least <= plan.simulation.seconds
                planned += 1
    assert impossible
    assert planned


@pytest.mark.slow
def test_a_layout_that_is_always_planned_need_not_be_among_those_considered() -> None:
    few = replace(ASKED, devices=2, global_batch=4)
    odd = Candidate(degrees=Degrees(tensor=2, sequence_parallel=False), samples=2, micro_batches=2)
    assert odd not in all_of(few)
    searched = search(few, workers=1, always=[odd])
    assert odd in [one.candidate for one in searched.found]
    assert len(searched.found) + len(searched.left_out) == len(all_of(few)) + 1
    with pytest.raises(PlanError, match="is a layout of 4 devices for steps of 8 samples; the search is for 2 and 4"):
        search(few, always=[Candidate(degrees=Degrees(shard=4), samples=2)])


def test_nothing_fits_and_nothing_divides() -> None:
    with pytest.raises(PlanError, match="does not fit on 4 devices in any layout"):
        search(replace(ASKED, budget=1 << 20), workers=1)
    with pytest.raises(PlanError, match="data-parallel ranks must divide"):
        search(replace(ASKED, global_batch=1, shape=replace(SHAPE, num_layers=1)), workers=1)


def test_a_layout_in_the_words_of_other_trainers() -> None:
    candidate = Candidate(
        degrees=Degrees(shard=2, tensor=2, pipeline=2, sequence_parallel=True), chunks=2, samples=1, micro_batches=4
    )
    whole = Policy((LayerPolicy(default=Recompute()),) * 4)
    titan = torchtitan(candidate, whole, 8, 512)
    assert "--parallelism.pipeline_parallel_schedule=Interleaved1F1B" in titan.flags
    assert "--activation_checkpoint.mode=full" in titan.flags
    assert titan.missing == ()
    other = megatron(candidate, Policy((LayerPolicy(rules=(Rule(Pattern("add"), Recompute()),)),) * 4), 8, 512, 4)
    assert "--num-layers-per-virtual-pipeline-stage 1" in other.flags
    assert len(other.missing) == 2
    assert "pipeline_interleave: true" in run_yaml(candidate, 512)


def test_a_search_is_refused_with_a_layout_or_without_a_batch() -> None:
    for given, said in (
        (["--devices", "8"], "needs both --devices and --global-batch"),
        (["--devices", "8", "--global-batch", "64", "--tp", "2"], "does not take --tp"),
        (["--devices", "8", "--global-batch", "64", "--optimizer", "sgd"], "does not take --optimizer"),
    ):
        result = CliRunner().invoke(app, ["plan", "llama3-8b", *given])
        assert result.exit_code == 1
        assert said in result.output


@pytest.mark.slow
def test_explain_explains_the_fastest_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "small", SHAPE)
    given = ["explain", "small", "--devices", "2", "--global-batch", "2", "--seq", "256"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    assert "small fits in" in result.output
    assert "2 x h100" in result.output
    assert "options" in result.output


@pytest.mark.slow
def test_the_command_prints_the_layouts_and_writes_the_page(tmp_path: pytest.TempPathFactory) -> None:
    page = f"{tmp_path}/page.html"
    given = ["plan", "llama3-8b", "--devices", "8", "--global-batch", "16", "--seq", "1024", "--html", page, "--json"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0
    value = json.loads(result.stdout)
    assert value["search"]["layouts"]
    assert value["search"]["exports"]["megatron"]["flags"]
    with open(page, encoding="utf-8") as file:
        assert "layouts considered" in file.read()

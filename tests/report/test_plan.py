from __future__ import annotations

import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

from lowtide.planner.plan import UNBOUNDED, Option, Plan
from lowtide.planner.plan_file import plan_as_json
from lowtide.report.page import make_page
from lowtide.report.plan import explanation_as_json, print_explanation, print_plan
from lowtide.report.words import headline, recommended, shown_options
from support.plan_cases import GIB, llama_plan


def printed(show: object, plan: Plan, width: int = 120) -> str:
    text = io.StringIO()
    show(plan, Console(file=text, width=width, highlight=False, markup=False))  # type: ignore[operator]
    return text.getvalue()


def shown(page: str) -> str:
    """A page without its scripts."""
    return re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def test_a_plan_that_fits_says_what_it_needs_and_how_fast_it_is() -> None:
    plan = llama_plan()
    text = printed(print_plan, plan)
    assert text.startswith("llama3-8b fits in 23 GiB: 22.82 GiB reserved, 1.928 s a step")
    assert "can be more than 0.42% faster" in text
    assert "keep 8.688 GiB, recompute 9.156 GiB, swap 3.938 GiB" in text
    assert "note: Attention is counted as the flash kernel." in text


def test_a_plan_that_does_not_fit_says_by_how_much() -> None:
    plan = llama_plan(feasible=False)
    assert headline(plan) == (
        "llama3-8b does not fit in 15.13 GiB: the least that any policy needs is 16.13 GiB, 1 GiB more"
    )
    text = printed(print_explanation, plan)
    assert "what to do\n  give it 16.13 GiB a device" in text
    assert "recommended" not in text
    assert "faster, by the solver's model" not in printed(print_plan, plan)


def test_an_explanation_says_where_the_peak_is_and_what_it_is_made_of() -> None:
    text = printed(print_explanation, llama_plan(8, 4, 8))
    assert "on stage 0" in text
    assert "4 micro-batches in flight" in text
    assert "layer 1, feed_forward.mul" in text
    assert "made of parameters 255 MiB, gradients 85 MiB, optimizer 510 MiB, activations" in text
    assert "feed_forward.w3 (activations)" in text


def test_one_way_is_recommended_and_it_is_said_how_to_take_it() -> None:
    text = printed(print_explanation, llama_plan())
    assert next(line for line in text.splitlines() if line.startswith("->")).split()[-2:] == ["the", "plan"]
    assert "12.8 GiB over" in text
    assert r"        feed_forward\.mul: true" in text


def test_stages_that_are_alike_are_one_line() -> None:
    plan = llama_plan(16, 4, 8)
    same = [replace(plan.simulation.stages[0], stage=stage) for stage in range(3)]
    stages = (*same, plan.simulation.stages[3])
    text = printed(print_plan, replace(plan, simulation=replace(plan.simulation, stages=stages)))
    assert "\n0-2 " in text


def test_ways_that_another_beats_are_left_out_and_well_known_ones_are_not() -> None:
    plan = llama_plan()
    stage = plan.simulation.stages[0]
    worse = replace(plan.simulation, seconds=9.0, stages=(replace(stage, seconds=9.0),))
    plan = replace(plan, options=(*plan.options, Option(name="worse", policy=plan.policy, simulation=worse, fits=True)))
    shown = [one.name for one in shown_options(plan)]
    assert shown == ["keep everything", "the plan", "recompute only", "recompute every layer"]
    best = recommended(plan)
    assert best is not None
    assert best.name == "the plan"


def test_no_slower_way_is_recommended_where_the_plan_is_none_of_them() -> None:
    plan = llama_plan()
    plan = replace(plan, options=tuple(one for one in plan.options if one.name != "the plan"))
    assert recommended(plan) is None
    assert "recommended: the plan\n" in printed(print_explanation, plan)


def test_of_ways_that_are_alike_one_is_shown() -> None:
    plan = llama_plan()
    best = recommended(plan)
    assert best is not None
    plan = replace(plan, options=(replace(best, name="the same"), *plan.options))
    assert len([one for one in shown_options(plan) if one.simulation.seconds == best.simulation.seconds]) == 1


def test_where_nothing_fits_the_ways_that_need_least_are_shown() -> None:
    plan = llama_plan(feasible=False)
    assert recommended(plan) is None
    assert min(one.simulation.reserved for one in shown_options(plan)) == plan.least


def test_the_explanation_is_json_too() -> None:
    plan = llama_plan(8, 2, 4)
    value = json.loads(json.dumps(explanation_as_json(plan)))
    assert value["fits"]
    assert value["budget"] == plan.budget
    assert value["peak"]["bytes"] == plan.simulation.peak
    assert sum(value["peak"]["made_of"].values()) == sum(one["bytes"] for one in value["peak"]["largest"])
    assert sum(option["recommended"] for option in value["options"]) == 1


def test_nothing_of_a_table_is_cut_off_on_a_narrow_terminal() -> None:
    for show in (print_plan, print_explanation):
        text = printed(show, replace(llama_plan(8, 4, 4), budget=GIB * 100), 80)
        tables = [line for line in text.splitlines() if line.startswith(("->", "    ", "0 ", "1 "))]
        assert tables
        assert max(map(len, tables)) <= 80
        assert not any("…" in line for line in tables)


def test_every_output_says_what_was_planned_for_and_how_fast_it_is() -> None:
    plan = llama_plan(8, 4, 16)
    line = "64 x h100, dp 8 sharded, tp 2, pp 4, 1f1b, 16 micro-batches of 1 x 8192 tokens, float32 parameters,"
    rate = 8192 * 16 * 8 / plan.simulation.seconds
    for text in (printed(print_plan, plan, 300), printed(print_explanation, plan, 300), shown(make_page(plan))):
        assert f"{line} bfloat16 compute, AdamW" in text
        assert f"{rate:,.0f}" in text
        assert "40.0%" in text
    for value in (explanation_as_json(plan), plan_as_json(plan)):
        assert (value["model"], value["device"], value["mfu"]) == ("llama3-8b", "h100", pytest.approx(0.4))
        assert value["tokens_per_second"] == pytest.approx(rate)
        assert value["pipeline"]["micro_batches"] == 16
        assert value["workload"] == plan.workload.as_json()
        assert (value["workload"]["sequence"], value["workload"]["devices"]) == (8192, 64)


def test_a_plan_without_a_budget_names_none() -> None:
    plan = replace(llama_plan(4), budget=UNBOUNDED)
    for text in (printed(print_plan, plan), printed(print_explanation, plan), shown(make_page(plan))):
        assert "without a budget" in text
        assert "TiB" not in text


def test_the_fields_words_are_used() -> None:
    swapped = llama_plan(8, 4, 16)
    assert "% faster than full activation checkpointing" in headline(llama_plan())
    assert "pipeline bubble" in printed(print_plan, swapped)
    assert "as MindSpore YAML" in printed(print_explanation, llama_plan())
    still = tuple(replace(stage, stall=0.0) for stage in swapped.simulation.stages)
    assert "no stalls" in printed(print_plan, replace(swapped, simulation=replace(swapped.simulation, stages=still)))

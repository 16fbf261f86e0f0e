"""What is shown of an adaptive run: the table when it switches, and its page."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lowtide.adaptive.record import AdaptEvent, AdaptRecord, AdaptStep, save_record
from lowtide.cli.main import app
from lowtide.errors import ReportError
from lowtide.planner.plan import Plan
from lowtide.planner.plan_file import save_plan
from lowtide.planner.simple import FULL, NOTHING
from lowtide.report.adapt import adaptive_text, print_report, say
from lowtide.report.adapt_page import MOST_STEPS, adaptive_events, adaptive_figures, adaptive_sentence
from lowtide.report.page import make_page
from lowtide.report.run import Run, read_directory
from lowtide.units import format_bytes, format_seconds
from support.plan_cases import llama_plan

GIB = 1 << 30


def record_of(measured: int, planned: int) -> AdaptRecord:
    """A run that switched after ``measured`` steps, in which one allocation failed ten steps later."""
    steps = [AdaptStep(step, 2.0, 20 * GIB, "measuring") for step in range(1, measured + 1)]
    steps += [AdaptStep(step, 1.5, 30 * GIB, "planned") for step in range(measured + 1, measured + planned + 1)]
    failed = measured + 10
    steps[failed - 1] = steps[failed - 1]._replace(seconds=1.9, rescued=2)
    return AdaptRecord(
        events=(
            AdaptEvent(measured, "switched", "the fastest <policy> in 32 GiB"),
            AdaptEvent(failed, "rescued", "2 allocations failed"),
            AdaptEvent(failed, "replanned", "2 allocations failed"),
            AdaptEvent(failed, "switched", "the fastest policy in 31 GiB"),
        ),
        steps=tuple(steps),
        plan="plan.json",
        budget=32 * GIB,
        capacity=40 * GIB,
    )


@pytest.fixture(scope="module")
def plan() -> Plan:
    return llama_plan()


def test_the_table_has_the_guides_words_and_the_plans_numbers(plan: Plan) -> None:
    lines = adaptive_text(plan).splitlines()
    assert lines[0] == "==================== ADAPTIVE-RECOMPUTE Report ===================="
    options = {option.name: option for option in plan.options}
    titles = ("Without recompute:", "With all recompute:", "With selective recompute:")
    for title, found in zip(titles, (options[NOTHING], options[FULL], plan), strict=True):
        (line,) = (one for one in lines if one.startswith(title))
        assert format_bytes(found.simulation.reserved) in line
        assert format_seconds(found.simulation.seconds) in line
        assert f"{options[FULL].simulation.seconds / found.simulation.seconds:.3f}x" in line
    assert ">> final selective strategy <<" in lines


def test_the_strategy_names_every_layer_once(plan: Plan) -> None:
    strategy = adaptive_text(plan).partition("<<\n")[2]
    named: list[int] = []
    for found in re.findall(r"layers? ([\d, -]+):", strategy):
        for part in found.split(","):
            first, _, last = part.strip().partition("-")
            named += range(int(first), int(last or first) + 1)
    assert sorted(named) == list(range(len(plan.policy.layers)))


def test_a_way_that_does_not_fit_is_said_to(plan: Plan) -> None:
    (kept,) = (option for option in plan.options if option.name == NOTHING)
    (line,) = (one for one in adaptive_text(plan).splitlines() if one.startswith("Without recompute:"))
    assert line.endswith("does not fit") == (not kept.fits)


def test_where_nothing_fits_the_strategy_is_full_recompute_and_the_least_is_said(plan: Plan) -> None:
    shown = adaptive_text(replace(plan, feasible=False, least=25 << 30)).splitlines()
    assert shown[-2:] == [">> final selective strategy <<", "  nothing fits: every layer is recomputed"]
    (line,) = (one for one in shown if one.startswith("With selective recompute:"))
    assert re.search(r"25 GiB +the least there is$", line)


@pytest.mark.parametrize("feasible", [True, False])
def test_the_table_is_whole_where_standard_error_is_no_terminal(plan: Plan, feasible: bool) -> None:
    shown = adaptive_text(replace(plan, feasible=feasible), width=80)
    assert "time a step" in shown
    assert "…" not in shown


def test_a_loop_of_ones_own_hears_of_it_on_standard_error(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    say("step 10: switched")
    print_report(plan)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("lowtide: step 10: switched\n==================== ADAPTIVE-RECOMPUTE Report")


def test_a_plan_without_operators_is_described_by_its_policy(plan: Plan) -> None:
    assert "everything" in adaptive_text(replace(plan, operators=()))


def test_a_page_of_an_adaptive_run_shows_its_steps_and_its_events(plan: Plan) -> None:
    page = make_page(plan, Run(adaptive=record_of(10, 50)))
    assert 'id="adapt"' in page
    assert 'data-figure="adapt_time"' in page
    assert 'data-figure="adapt_memory"' in page
    assert "the fastest &lt;policy&gt; in 32 GiB" in page
    assert "2 allocations failed and the run went on" in page
    assert 'id="adapt"' not in make_page(plan, Run(seconds=1.0))
    assert 'id="adapt"' in make_page(None, Run(adaptive=AdaptRecord()))


def test_phases_rescues_and_plans_are_marked_in_the_pictures() -> None:
    figures = adaptive_figures(record_of(10, 50))
    for figure in figures.values():
        phases = {trace["name"]: trace["x"] for trace in figure["data"]}
        assert phases["measuring, under the safe policy"] == list(range(1, 11))
        assert phases["under the plan"] == list(range(11, 61))
        assert phases["an allocation failed, the run went on"] == [20]
        upright = [shape for shape in figure["layout"]["shapes"] if shape["yref"] == "paper"]
        assert [shape["x0"] for shape in upright] == [10.5, 20.5]
        named = [(note["x"], note["text"]) for note in figure["layout"]["annotations"] if note["xref"] == "x"]
        assert named == [(10.5, "switch"), (20.5, "new plan")]
    levels = [shape["y0"] for shape in figures["adapt_memory"]["layout"]["shapes"] if shape["yref"] == "y"]
    assert levels == [40, 32]


def test_a_budget_far_above_everything_is_said_and_not_drawn() -> None:
    record = replace(record_of(10, 50), capacity=1 << 40, budget=1 << 39)
    figure = adaptive_figures(record)["adapt_memory"]["layout"]
    assert [shape for shape in figure["shapes"] if shape["yref"] == "y"] == []
    assert [note["text"] for note in figure["annotations"] if note["xref"] == "paper"] == []
    assert adaptive_sentence(record).endswith(" The capacity of 1 TiB and the budget of 512 GiB are far above.")
    assert "far above" not in adaptive_sentence(record_of(10, 50))


def test_steps_without_a_measured_memory_have_no_picture_of_it() -> None:
    record = AdaptRecord(steps=(AdaptStep(1, 1.0, 0, "measuring"),))
    assert list(adaptive_figures(record)) == ["adapt_time"]
    assert adaptive_figures(AdaptRecord()) == {}
    assert "no allocation failed" in adaptive_sentence(record)


def test_a_long_run_is_thinned_and_no_failure_is_left_out() -> None:
    record = record_of(10, 30_000)
    drawn = [x for trace in adaptive_figures(record)["adapt_time"]["data"][:-1] for x in trace["x"]]
    assert len(drawn) <= MOST_STEPS + 1
    assert 20 in drawn
    many = replace(record, events=record.events * 100)
    assert "360 more are in adaptive.json" in adaptive_events(many)


def test_a_runs_directory_is_read_whole_and_compared_with_its_last_plan(tmp_path: Path, plan: Plan) -> None:
    record = record_of(10, 50)
    save_record(record, tmp_path / "adaptive.json")
    save_plan(plan, tmp_path / "plan.json")
    lines = [{"step": step, "seconds": 9.0, "peak_bytes": (100 - step) * GIB} for step in range(1, 61)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found, run = read_directory(tmp_path)
    assert found is not None
    assert found.policy.digest == plan.policy.digest
    assert run.adaptive == record
    assert run.seconds == 1.5  # neither the steps before the switch nor the rescued one
    assert run.peak == 79 * GIB
    page = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["report", str(tmp_path), "-o", str(page)])
    assert result.exit_code == 0, result.output
    assert 'id="adapt"' in page.read_text()


def test_another_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="not the directory of a run"):
        read_directory(tmp_path)
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 1
    assert "not the directory of a run" in result.output

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import PlanError
from lowtide.planner.plan_file import load_plan, plan_as_json, plan_from_json, save_plan
from support.plan_cases import llama_plan


@pytest.mark.parametrize(("stages", "feasible"), [(1, True), (4, True), (1, False)])
def test_a_plan_comes_back_from_its_file_as_it_was(tmp_path: Path, stages: int, feasible: bool) -> None:
    plan = llama_plan(8, stages, 2, feasible=feasible)
    save_plan(plan, tmp_path / "plan.json")
    again = load_plan(tmp_path / "plan.json")
    for name in ("model", "budget", "pipeline", "policy", "simulation", "curve", "yaml", "notes", "operators", "least"):
        assert getattr(again, name) == getattr(plan, name), name
    assert again.feasible is feasible


def test_of_the_other_options_the_sums_are_kept_and_the_timelines_are_not() -> None:
    plan = llama_plan(4)
    again = plan_from_json(plan_as_json(plan))
    assert [one.name for one in again.options] == [one.name for one in plan.options]
    assert [one.simulation.reserved for one in again.options] == [one.simulation.reserved for one in plan.options]
    assert any(one.simulation.stages[0].spans for one in plan.options)
    assert not any(one.simulation.stages[0].spans for one in again.options)


def test_layers_that_are_treated_alike_are_written_once() -> None:
    written = plan_as_json(llama_plan(64))
    assert len(written["operators_of_layer"]) == 64
    assert len(written["operators"]) <= 6


@pytest.mark.parametrize(
    "change",
    [
        {"lowtide_plan": 2},
        {"simulation": None},
        {"simulation": {"seconds": 1}},
        {"policy": {}},
        {"operators_of_layer": [99]},
        {"curve": [[1]]},
        {"pipeline": {}},
    ],
)
def test_what_is_no_plan_is_refused_in_words(tmp_path: Path, change: dict[str, Any]) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({**plan_as_json(llama_plan(2)), **change}))
    with pytest.raises(PlanError, match=r"plan\.json: not a plan"):
        load_plan(file)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '"plan"'])
def test_any_other_file_is_refused_in_words(tmp_path: Path, text: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(PlanError, match=r"plan\.json"):
        load_plan(file)


def test_a_file_is_compressed_if_its_name_says_so(tmp_path: Path) -> None:
    plan = llama_plan(4)
    save_plan(plan, tmp_path / "plan.json")
    save_plan(plan, tmp_path / "plan.json.gz")
    assert (tmp_path / "plan.json.gz").stat().st_size < (tmp_path / "plan.json").stat().st_size / 3
    assert load_plan(tmp_path / "plan.json.gz") == load_plan(tmp_path / "plan.json")


@pytest.mark.parametrize("data", [b"", b"{}", b"\x1f\x8b\x08\x00", b"\x1f\x8b" + b"\x00" * 40])
def test_a_damaged_compressed_file_is_refused_in_words(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "plan.json.gz"
    file.write_bytes(data)
    with pytest.raises(PlanError, match=r"plan\.json\.gz"):
        load_plan(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="No such file"):
        load_plan(tmp_path / "plan.json")

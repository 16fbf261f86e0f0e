"""The plan of a run is said without running it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide.config.check import check_file
from lowtide.operators.names import layer_operators
from lowtide.train.dry_run import dry_run, plan_of
from lowtide.train.run import read_run

EXAMPLES = Path(__file__).parents[2] / "examples" / "yaml"


def test_every_stage_is_built_and_counted() -> None:
    check = check_file(EXAMPLES / "train_recompute_48_layers.yaml", layer_operators)
    plan = plan_of(read_run(check), check)
    assert (plan["processes"], plan["schedule"]) == (5, "interleaved")
    stages = sorted(plan["stages"], key=lambda stage: stage["stage"])
    assert [layer for stage in stages for layer in stage["layers"]] == list(range(48))
    assert stages[0]["decisions"] == "2 recomputed, 2 by operator"
    middle = {stage["parameters"] for stage in stages[1:-1]}
    assert len(middle) == 1  # five layers each, and nothing else


def test_eight_billion_parameters_are_planned_on_a_laptop(capsys: pytest.CaptureFixture[str]) -> None:
    check = check_file(EXAMPLES / "train_llama_8b.yaml", layer_operators)
    assert dry_run(read_run(check), check, as_json=False) == 0
    printed = capsys.readouterr().out
    assert "32 processes: shard 8, tensor 4" in printed
    assert "8,030,261,248" in printed


def test_a_run_that_adapts_itself_says_so() -> None:
    adapt = {("adapt",): {"budget": "60GiB", "profiling_step": 20}}
    check = check_file(EXAMPLES / "train_llama_8b.yaml", layer_operators, adapt)
    (note,) = (one for one in plan_of(read_run(check), check)["notes"] if "adapts itself" in one)
    assert "20 steps are measured" in note
    assert "within 60 GiB" in note

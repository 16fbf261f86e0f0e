"""The layouts of a training file: the older one and that of 2026."""

from __future__ import annotations

import pytest

from support.schema_reading import errors, only_error, read


@pytest.mark.parametrize("key", ["training", "parallelism", "recompute", "recompute_comm", "swap"])
def test_the_layout_of_2026_is_recognised_by_its_sections(key: str) -> None:
    result, problems = read({key: {}, "model": {"num_hidden_layers": 7}})
    assert result.layout == "2026"
    assert result.model.num_layers == 7
    assert not problems.errors


@pytest.mark.parametrize("old", ["runner_config", "parallel_config", "recompute_config", "swap_config"])
def test_two_layouts_in_one_file_are_an_error_that_names_both(old: str) -> None:
    problem = only_error({old: {}, "training": {}})
    assert f"`{old}`" in problem.message
    assert "`training`" in problem.message


def test_a_section_of_the_other_layout_is_an_error() -> None:
    assert "graph layout" in only_error({"training": {}, "moe_config": {}}).message
    assert "`lr_schedule`" in only_error({"runner_config": {}, "lr_scheduler": {}}).hint
    assert "directly under `model`" in only_error({"training": {}, "model": {"model_config": {}}}).hint


def test_layers_per_stage_are_checked_in_their_spelling() -> None:
    for good in ("auto", ["0-3", "4-7"], ["0-1,4-5", "2-3, 6"]):
        assert not errors({"parallelism": {"pipeline_parallel_layers_per_stage": good}})
    for bad in (["0..3"], ["a"], [""], ["1-"], "all", [3]):
        assert only_error({"parallelism": {"pipeline_parallel_layers_per_stage": bad}}).path[:2] == (
            "parallelism",
            "pipeline_parallel_layers_per_stage",
        )

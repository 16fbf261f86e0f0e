"""The section of the adaptive mode: its names, its values, and the MindSpeed guide's rules that a file can break."""

from __future__ import annotations

from typing import Any

import pytest

from lowtide.config.check import check_text
from support.schema_reading import errors, only_error, only_warning, read


def test_the_guides_names_mean_the_same_in_either_spelling() -> None:
    ours = {"device_size": 61440, "profiling_step": 20, "device_swap": True}
    for prefix, joint in (("adaptive_recompute_", "_"), ("adaptive-recompute-", "-")):
        theirs = {prefix + name.replace("_", joint): value for name, value in ours.items()}
        settings, problems = read({"adapt": theirs})
        assert not problems.errors + problems.warnings
        assert settings.adapt == read({"adapt": ours})[0].adapt


def test_a_budget_is_a_size_or_left_to_the_device() -> None:
    assert read({"adapt": {"budget": "60GiB"}})[0].adapt.budget == 60 * 2**30
    assert read({"adapt": {"budget": "auto"}})[0].adapt.budget == "auto"
    assert 'must be "auto" or a size' in only_error({"adapt": {"budget": "60 parsecs"}}).message


@pytest.mark.parametrize(
    "value", [{"device_swap": "yes"}, {"verbosity": "loud"}, {"device_size": 1.5}, {"profiling_step": True}]
)
def test_a_value_of_another_kind_is_an_error_and_nothing_more_is_said(value: dict[str, Any]) -> None:
    problems = read({"adapt": value})[1]
    assert [problem.path[0] for problem in problems.errors] == ["adapt"]
    assert problems.warnings == []


@pytest.mark.parametrize(
    ("document", "hint"),
    [
        ({"adapt": {"device_swp": True}}, "did you mean `device_swap`?"),
        ({"adapt": {"adaptive_recompute_device_siz": 5}}, "did you mean `adaptive_recompute_device_size`?"),
        ({"adaptt": {"budget": "auto"}}, "did you mean `adapt`?"),
    ],
)
def test_a_typing_error_is_reported_with_the_name_that_was_meant(document: dict[str, Any], hint: str) -> None:
    assert only_error(document).hint == hint


def test_two_ways_to_say_what_the_plan_may_fill_are_one_too_many() -> None:
    problem = only_error({"adapt": {"budget": "auto", "adaptive_recompute_device_size": 5}})
    assert "`budget` and `adaptive_recompute_device_size`" in problem.message
    assert problem.path == ("adapt", "adaptive_recompute_device_size")


@pytest.mark.parametrize(("name", "instead"), [("profiling_step", 10), ("device_size", None)])
@pytest.mark.parametrize("value", [0, -4])
def test_a_number_that_is_not_above_zero_is_warned_of_and_is_its_default(
    name: str, instead: int | None, value: int
) -> None:
    document = {"adapt": {"device_swap": True, name: value}}
    assert f"found {value}" in only_warning(document).message
    assert getattr(read(document)[0].adapt, name) == instead


def test_a_section_that_turns_nothing_on_says_so() -> None:
    assert "has no effect" in only_warning({"adapt": {"profiling_step": 20}}).message
    assert not errors({"adapt": {}})
    for value in ({"budget": "auto"}, {"device_size": 5}, {"device_swap": True}):
        problems = read({"adapt": value})[1]
        assert not problems.warnings + problems.errors


def test_a_file_that_adapts_is_valid_in_either_layout_with_fixed_decisions() -> None:
    graph = "model: {model_config: {num_layers: 4}}\nrecompute_config: {recompute: [1]}\nadapt: {budget: auto}\n"
    newer = "training: {steps: 4}\nmodel: {num_layers: 4}\nswap: {enable: true}\nadapt: {budget: 60GiB}\n"
    for text in (graph, newer):
        assert check_text(text).ok, check_text(text).problems.errors


def test_a_warning_has_the_place_of_the_key_in_whichever_spelling() -> None:
    check = check_text("adapt:\n  device_swap: true\n  adaptive-recompute-profiling-step: 0\n")
    (problem,) = check.problems.warnings
    assert problem.line == 3

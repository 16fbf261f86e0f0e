"""The recorded vectors: what the reference does with the same settings, and where we mean to differ."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lowtide.config.check import Check, check_text
from lowtide.operators.names import layer_operators
from lowtide.policy import Keep, Recompute

_spec = importlib.util.spec_from_file_location("vectors", Path(__file__).with_name("vectors.py"))
assert _spec is not None
assert _spec.loader is not None
golden = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(golden)

GRAPH = golden.vectors("golden")
FORM_2026 = [vector for vector in golden.vectors("golden_extra") if vector["kind"] == "pynative"]
UNCHANGED = {"we": None, "normalized": False, "log": False}


@cache  # several tests look at each
def check(text: str) -> Check:
    return check_text(text, layer_operators)


@pytest.mark.parametrize("vector", GRAPH, ids=lambda vector: f"{vector['id']}-{vector['kind']}")
def test_graph_form_is_understood_as_the_reference_does(vector: dict[str, Any]) -> None:
    deviation = golden.deviations("graph").get(vector["id"], UNCHANGED)
    result = check(golden.graph_file(vector))
    rejected = bool(vector["error"] or vector["check_rules"])
    expected = deviation["we"] or ("reject" if rejected else "accept")
    assert result.ok == (expected == "accept"), [problem.message for problem in result.problems.errors]
    if expected == "reject":
        return
    recorded = vector
    if vector["kind"] == "alias_bug":  # the vector that says what it should have given
        target = re.search(r"see vector (\d+)", vector["note"])
        assert target is not None
        recorded = next(other for other in GRAPH if other["id"] == int(target[1]))
    if "normalized" not in recorded:
        return
    normalized = result.as_json()["normalized"]
    assert (normalized == recorded["normalized"]) != deviation["normalized"]
    if "layer_log" in recorded:
        ours = [(level, golden.collapse(text)) for level, text in result.log]
        theirs = [(level, golden.collapse(text)) for level, text in recorded["init_log"] + recorded["layer_log"]]
        if deviation["log"]:
            assert ours != theirs, "the deviation is not needed any more"
        else:
            assert ours == theirs


@pytest.mark.parametrize("vector", GRAPH, ids=lambda vector: f"{vector['id']}-{vector['kind']}")
def test_policy_recomputes_and_swaps_what_the_reference_recorded(vector: dict[str, Any]) -> None:
    """The Policy itself, layer by layer, against what the reference did to its modules."""
    deviation = golden.deviations("graph").get(vector["id"], UNCHANGED)
    result = check(golden.graph_file(vector))
    if not result.ok or "layers" not in vector or vector["id"] == 471 or deviation["normalized"]:
        return
    assert result.policy is not None
    for layer, (settings, recorded) in enumerate(zip(result.policy.layers, vector["layers"], strict=True)):
        assert (settings.default == Recompute()) == recorded["full"], layer
        swap = recorded.get("layer_swap")
        if swap is not None and not recorded["full"]:
            assert getattr(settings.default, "prefetch", None) == swap, layer
        if swap is None and not recorded["full"]:
            assert settings.default == Keep(), layer
        assert result.form is not None
        assert result.form.placement is not None
        assert result.form.placement.stages[layer] == recorded["stage"], layer


@pytest.mark.parametrize("vector", FORM_2026, ids=lambda vector: f"{vector['id']}-{vector['note']}")
def test_form_2026_is_understood_as_the_reference_does(vector: dict[str, Any]) -> None:
    deviation = golden.deviations("form_2026").get(vector["id"], UNCHANGED)
    result = check(golden.file_2026(vector))
    expected = deviation["we"] or ("reject" if vector["error"] else "accept")
    assert result.ok == (expected == "accept"), [problem.message for problem in result.problems.errors]
    if expected == "reject" or vector["error"]:
        return
    full_layers = result.as_json()["normalized"]["full_layers"]
    assert (full_layers == vector["full_layers"]) != deviation["normalized"]
    assert (result.log == [tuple(line) for line in vector["log"]]) != deviation["log"]


def test_every_vector_is_there() -> None:
    assert len(GRAPH) == 576
    assert len(FORM_2026) == 53


def test_every_rejected_vector_says_what_to_do() -> None:
    for vector in GRAPH:
        result = check(golden.graph_file(vector))
        assert all(problem.message and problem.hint for problem in result.problems.errors), vector["id"]

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.config.check import Check, check_text
from lowtide.config.convert import convert_form, to_path, to_segments
from lowtide.operators.names import layer_operators
from lowtide.policy import NameTree, Pattern

NAMES = [r"mlp\.mul", r"mlp\.activation_func\.silu", r".*\.norm", r"self_attention\.linear_(qkv|proj)\.matmul", "mlp"]


def check(value: dict[str, Any]) -> Check:
    result = check_text("".join(f"{key}: {json.dumps(item)}\n" for key, item in value.items()), layer_operators)
    assert result.ok, result.as_json()["errors"]
    return result


def meaning(result: Check) -> Any:
    """What a file does: every operator's decision in every layer, and the collectives."""
    assert result.resolution is not None
    return result.resolution.layers


def effective(normalized: dict[str, Any]) -> dict[str, Any]:
    """The normal form without patterns that are on nowhere."""
    off = ([], False)
    return {
        key: {name: item for name, item in value.items() if item not in off and any(map(any, item))}
        if key.startswith("select")
        else value
        for key, value in normalized.items()
    }


counts = st.one_of(
    st.booleans(),
    st.lists(st.integers(0, 4), max_size=2),
    st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), min_size=2, max_size=2),
)
files = st.fixed_dictionaries(
    {
        "use_legacy": st.just(False),
        "model": st.just({"model_config": {"num_layers": 9, "pp_interleave_num": 2, "offset": [[1, 0], [0, 0]]}}),
        "parallel_config": st.just({"pipeline_stage": 2, "micro_batch_num": 2}),
        "recompute_config": st.fixed_dictionaries(
            {},
            optional={
                "recompute": counts,
                "select_recompute": st.dictionaries(st.sampled_from(NAMES), counts, max_size=3),
                "select_comm_recompute": st.dictionaries(st.sampled_from(NAMES[2:4]), counts, max_size=2),
                "select_recompute_exclude": st.dictionaries(st.sampled_from(NAMES[:2]), counts, max_size=1),
            },
        ),
    }
)


@given(files)
def test_legacy_to_2026_and_back_means_the_same(value: dict[str, Any]) -> None:
    first = check(value)
    newer, lost = convert_form(first, "2026")
    second = check(newer)
    older, lost_again = convert_form(second, "legacy")
    third = check(older)
    if not lost:
        assert meaning(second) == meaning(first)
    if not lost and not lost_again:
        assert meaning(third) == meaning(first)
        if "swap_config" not in older:
            ours, theirs = effective(third.as_json()["normalized"]), effective(first.as_json()["normalized"])
            assert ours["layer_recompute"] == theirs["layer_recompute"]
            assert ours["layer_list"] == theirs["layer_list"]


@given(st.lists(st.booleans(), min_size=4, max_size=4), st.lists(st.booleans(), min_size=4, max_size=4))
def test_2026_to_legacy_and_back_means_the_same(full: list[bool], select: list[bool]) -> None:
    layers = {"full": [str(i) for i in range(4) if full[i]], "select": [str(i) for i in range(4) if select[i]]}
    recompute: dict[str, Any] = {"mode": "select" if layers["select"] else "full" if layers["full"] else "None"}
    if layers["full"]:
        recompute["full_recompute_layer"] = layers["full"]
    if layers["select"]:
        recompute["select_module"] = {"mlp.mul": layers["select"]}
    first = check({"model": {"num_layers": 4}, "recompute": recompute})
    older, lost = convert_form(first, "legacy")
    assert not lost
    second = check(older)
    assert meaning(second) == meaning(first)
    newer, lost = convert_form(second, "2026")
    assert not lost
    assert meaning(check(newer)) == meaning(first)


@pytest.mark.parametrize("name", NAMES)
def test_a_pattern_names_the_same_operators_in_both_forms(name: str) -> None:
    tree = NameTree.of(operator.name for operator in layer_operators("mcore"))
    pattern = Pattern(name)
    path = to_path(pattern)
    assert set(Pattern(path, "path").matches(tree)) == set(pattern.matches(tree))
    back = to_segments(path)
    assert back is not None
    assert Pattern(back).matches(tree) == pattern.matches(tree)


@pytest.mark.parametrize("text", ["self_attention.*", ".*mul", "mlp.(mul|silu)", r"mlp\W+mul", "[^m].*"])
def test_a_pattern_that_may_cross_levels_has_no_counterpart(text: str) -> None:
    assert to_segments(text) is None


def lost(value: dict[str, Any], to: str) -> str:
    _, lines = convert_form(check(value), to)  # type: ignore[arg-type]
    return "\n".join(lines)


def test_what_cannot_be_expressed_is_said() -> None:
    model = {"model": {"model_config": {"num_layers": 4}}}
    swap = {"swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 20, "layers": [0]}]}}
    assert "backward_prefetch 20 is written as default_prefetch 1" in lost({**model, **swap}, "2026")
    switch = {"recompute_config": {"recompute_slice_activation": True, "recompute": True}}
    assert "recompute_slice_activation has no counterpart" in lost({**model, **switch}, "2026")
    assert "carry over by hand: runner_config" in lost(
        {**model, "recompute_config": {"recompute": True}, "runner_config": {"epochs": 1}}, "2026"
    )
    newer = {"model": {"num_layers": 4}, "recompute": {"mode": "select", "select_module": {"mlp.*": ["0"]}}}
    assert "mlp.* may cross levels" in lost(newer, "legacy")
    both = {
        "model": {"num_layers": 4},
        "recompute": {"mode": "full", "full_recompute_layer": ["0"]},
        "swap": {"enable": True, "layer_swap": [{"layers": ["0"]}]},
    }
    assert "cannot swap its input" in lost(both, "legacy")


def test_scattered_layers_are_written_as_indices() -> None:
    newer = {"model": {"num_layers": 4}, "recompute": {"mode": "full", "full_recompute_layer": ["1", "3"]}}
    older, lines = convert_form(check(newer), "legacy")
    assert not lines
    assert older["recompute_config"]["recompute"] == [1, 3]
    assert older["swap_config"] == {"swap": True, "layer_swap": []}

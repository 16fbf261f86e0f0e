from __future__ import annotations

import time

import pytest

from lowtide.errors import PatternError
from lowtide.policy import NameTree, Pattern

TREE = NameTree.of(
    [
        "add",
        "ffn_norm.norm",
        "attention_norm.norm",
        "attention.wq.matmul",
        "attention.wk.matmul",
        "attention.flash_attention.flash_attention",
        "feed_forward.mul",
        "feed_forward.w1.activation.silu",
    ]
)


def found(text: str, syntax: str = "segments") -> list[str]:
    return [match.name for match in Pattern(text, syntax).matches(TREE)]  # type: ignore[arg-type]


def test_pattern_splits_at_escaped_dots_and_depth_is_exact() -> None:
    assert found(r"feed_forward\.mul") == ["feed_forward.mul"]
    assert found("mul") == []
    assert found("silu") == []


def test_each_segment_matches_a_whole_name() -> None:
    assert found(r".*\.norm") == ["ffn_norm.norm", "attention_norm.norm"]
    assert found(r"attention\.w[qk]") == ["attention.wq", "attention.wk"]
    assert found(r"atten\.wq") == []


def test_final_segment_matches_operators_before_modules() -> None:
    tree = NameTree.of(["norm.mul", "nor"])
    assert [(m.name, m.is_module) for m in Pattern("nor.*").matches(tree)] == [("nor", False), ("norm", True)]


def test_plain_dot_separates_only_without_other_special_characters() -> None:
    assert found("feed_forward.mul") == ["feed_forward.mul"]
    assert found("feed_.*.mul") == []


def test_doubled_backslash_is_read_as_one() -> None:
    pattern = Pattern(r"feed_forward\\.mul")
    assert pattern.has_doubled_backslash
    assert pattern.matches(TREE) == Pattern(r"feed_forward\.mul").matches(TREE)


def test_path_syntax_matches_the_whole_dotted_path() -> None:
    assert found("attention.w.", "path") == ["attention.wq", "attention.wk"]
    assert found(".*silu", "path") == ["feed_forward.w1.activation.silu"]


def test_module_means_every_operator_below_it() -> None:
    assert Pattern("feed_forward").operators(TREE) == {"feed_forward.mul", "feed_forward.w1.activation.silu"}
    assert Pattern("feed_forward").operators(TREE, modules=False) == frozenset()


def test_nearest_names_are_those_a_person_would_look_for() -> None:
    assert Pattern(r"feed_foward\.mul").nearest(TREE)[0] == "feed_forward.mul"
    assert Pattern("silu").nearest(TREE) == ("feed_forward.w1.activation.silu",)


@pytest.mark.parametrize("text", ["", "(unclosed", r"a\.", r"\.a", "a..b", "x" * 300, "[z-a]", "a" * 100])
def test_what_is_no_pattern_is_refused(text: str) -> None:
    with pytest.raises(PatternError):
        Pattern(text)


@pytest.mark.parametrize("text", ["(a+)+b", "(.*)*x", "(a|a)*x", ".*.*.*.*.*x", "a?" * 30 + "b", "(a{1,9}){1,9}x"])
def test_patterns_that_could_take_very_long_are_refused(text: str) -> None:
    with pytest.raises(PatternError, match="very long"):
        Pattern(text, "path")


def test_slowest_pattern_that_is_allowed_is_fast() -> None:
    tree = NameTree.of(["a" * 60 + ".b"])
    start = time.thread_time()
    Pattern("a*a*a*a*x", "path").matches(tree)
    assert time.thread_time() - start < 1.0


@pytest.mark.parametrize(
    ("one", "other", "covers"),
    [
        (r"feed_forward\.mul", r"feed_forward\.mul", True),
        (r"feed_forward\..*", r"feed_forward\.mul", True),
        (r"feed_forward\.mul", r"feed_forward\..*", True),
        (r"feed_forward", r"feed_forward\.mul", False),
        (r"attention\.mul", r"feed_forward\.mul", False),
    ],
)
def test_covering_goes_segment_by_segment_in_either_direction(one: str, other: str, covers: bool) -> None:
    assert Pattern(one).covers(Pattern(other)) is covers

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from lowtide.config.document import Document, Mark, format_path
from lowtide.config.parse import MAX_BYTES, load_document, parse_document, parse_value
from lowtide.config.problem import Problem, Problems


def parsed(text: str) -> tuple[Document, list[Problem]]:
    problems = Problems()
    return parse_document(text, problems), problems.errors


def value(text: str) -> Any:
    document, errors = parsed(text)
    assert not errors
    return document.value


def error(text: str) -> Problem:
    document, errors = parsed(text)
    assert document.value is None
    (problem,) = errors
    return problem


def test_only_plain_types_come_out() -> None:
    text = "[1, -2, 0x1F, 0o17, 2.5, 1e-5, 5.e-5, .inf, true, False, null, ~, yes, '3', 2024-01-02, '', \"a\\tb\"]"
    expected = [1, -2, 31, 15, 2.5, 1e-5, 5e-5, float("inf"), True, False, None, None, "yes", "3", "2024-01-02", ""]
    assert value(text) == [*expected, "a\tb"]


def test_tuples_are_tuples() -> None:
    assert value("!!python/tuple [1, !!python/tuple [2]]") == (1, (2,))


def test_aliases_and_merge_keys_are_expanded() -> None:
    assert value("a: &x {b: 1, c: 2}\nd: *x\ne: {<<: *x, c: 3}\n") == {
        "a": {"b": 1, "c": 2},
        "d": {"b": 1, "c": 2},
        "e": {"b": 1, "c": 3},
    }


def test_every_key_and_value_has_its_position() -> None:
    document, _ = parsed("swap_config:\n  op_swap:\n    - op_name: attention\n      layers: [0, 7]\n")
    path = ("swap_config", "op_swap", 0, "layers", 1)
    assert document.mark(path) == Mark(4, 19)
    assert document.mark(("swap_config", "op_swap", 0, "layers"), key=True) == Mark(4, 7)
    assert document.mark((*path, "deeper")) == Mark(4, 19)
    assert document.mark(("nowhere",)) == Mark(1, 1)
    assert format_path(path) == "swap_config.op_swap[0].layers[1]"


@pytest.mark.parametrize(
    ("text", "line", "column", "words"),
    [
        ("a: !!python/object/apply:os.system ['true']", 1, 4, "not allowed"),
        ("a: !new {}", 1, 4, "not allowed"),
        ("a: !!binary aGk=", 1, 4, "not allowed"),
        ("a: 1\nb: 2\na: 3", 3, 1, "given twice"),
        ("a: *nothing", 1, 4, "refers to no anchor"),
        ("a: &a [*a]", 1, 8, "contains itself"),
        ("a: [1, 2", 1, 9, "not valid YAML"),
        ("a:\n\t- 1", 2, 1, "not valid YAML"),
        ("? [a, b]\n: 1", 1, 3, "plain name"),
        ("a: 1\n---\nb: 2", 2, 1, "second YAML document"),
        ("a: " + "9" * 500, 1, 4, "digits"),
        ("<<: 3", 1, 1, "merges a mapping"),
    ],
)
def test_what_is_wrong_is_said_with_its_position(text: str, line: int, column: int, words: str) -> None:
    problem = error(text)
    assert (problem.line, problem.column) == (line, column)
    assert words in problem.message


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (bomb(9), "aliases are expanded"),
        ("[" * 5_000, "nested deeper"),
        ("a: " * 3 + "{" * 60, "not valid YAML"),
        ("x" * (MAX_BYTES + 1), "at most"),
    ],
    ids=["aliases", "depth", "mixed", "size"],
)
def test_size_depth_and_aliases_are_bounded(text: str, words: str) -> None:
    start = time.thread_time()
    assert words in error(text).message
    assert time.thread_time() - start < 5.0


def test_a_file_that_cannot_be_read_is_an_error_not_a_traceback(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "missing.yaml", "No such file"), (tmp_path, "directory")):
        problems = Problems()
        load_document(path, problems)
        assert words in problems.errors[0].message


def test_bytes_that_are_not_utf8_are_pointed_at(tmp_path: Path) -> None:
    file = tmp_path / "latin.yaml"
    file.write_bytes(b"a: 1\nb: caf\xe9\n")
    problems = Problems()
    load_document(file, problems)
    assert (problems.errors[0].line, problems.errors[0].column) == (2, 7)


def test_a_byte_order_mark_is_no_matter(tmp_path: Path) -> None:
    file = tmp_path / "bom.yaml"
    file.write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert load_document(file, Problems()).value == {"a": 1}


def test_single_values_are_parsed_for_the_command_line() -> None:
    assert parse_value("[[0, 1], [1, 0]]") == [[0, 1], [1, 0]]
    with pytest.raises(ValueError, match="not valid YAML"):
        parse_value("[1")

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.config.layer_counts import counts_of, indices_of
from lowtide.config.placement import Placement, even, place
from lowtide.config.problem import Problems


def placed(num_layers: int, stages: int, chunks: int, offset: object, **more: bool) -> Placement:
    problems = Problems()
    placement = place(num_layers, stages, chunks, offset, problems, **more)  # type: ignore[arg-type]
    assert placement is not None, problems.errors
    return placement


def refused(num_layers: int, stages: int, chunks: int, offset: object) -> str:
    problems = Problems()
    assert place(num_layers, stages, chunks, offset, problems) is None
    (problem,) = problems.errors
    return problem.message


def test_layers_fill_the_stages_of_one_chunk_then_those_of_the_next() -> None:
    placement = placed(10, 2, 2, [[1, 0], [1, 0]])
    assert placement.layer_list == [[3, 2], [3, 2]]
    assert placement.stages == (0, 0, 0, 1, 1, 0, 0, 0, 1, 1)
    assert placement.chunks == (0, 0, 0, 0, 0, 1, 1, 1, 1, 1)
    assert placement.positions == (0, 1, 2, 0, 1, 0, 1, 2, 0, 1)


def test_offset_is_checked_as_written_and_broadcast_afterwards() -> None:
    assert placed(5, 2, 1, 1).layer_list == [[3, 3]]
    assert placed(5, 2, 2, [1, 0]).layer_list == [[2, 1], [2, 1]]
    assert placed(5, 2, 2, [1, 0]).num_layers == 5


def test_one_stage_ignores_the_offset() -> None:
    assert placed(4, 1, 1, [9, 9]).layer_list == [[4]]


def test_zero_bubble_v_runs_odd_chunks_backwards() -> None:
    placement = placed(10, 2, 2, [[1, 0], [0, 1]], folded=True)
    assert placement.layer_list == [[3, 2], [3, 2]]
    assert placement.stages == (0, 0, 0, 1, 1, 1, 1, 1, 0, 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((8, 2, 1, [0, 0, 0]), "3 entries for 2 stages"),
        ((8, 2, 2, [[0, 0]]), "1 rows for 2 chunks"),
        ((9, 2, 1, 0), "leave 1 over"),
        ((8, 2, 1, [1, 0]), "adds up to 1"),
        ((8, 4, 1, [1, -2, 1, 0]), "would hold 0 layers"),
        ((8, 4, 1, [-3, 1, 1, 1]), "would hold -1 layers"),
        ((8, 2, 1, [0.5, -0.5]), "must be"),
        ((8, 2, 1, "0"), "must be"),
        ((8, 2, 1, None), "must be"),
        ((8, 2, 1, True), "must be"),
        ((8, 2, 2, [[0, 0], [0]]), "1 entries here"),
        ((8, 65_536, 1_024, 0), "cannot fill"),
    ],
)
def test_an_offset_that_does_not_fit_is_refused_in_words(arguments: tuple[int, int, int, object], words: str) -> None:
    assert words in refused(*arguments)


@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 3))
def test_a_fallback_placement_has_the_same_shape_and_every_layer(layers: int, stages: int, chunks: int) -> None:
    placement = even(layers, stages, chunks)
    assert placement.num_layers == layers
    if stages * chunks <= layers:
        assert (placement.num_stages, placement.num_chunks) == (stages, chunks)


PLACEMENT = placed(48, 5, 2, [[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]])


def counts(value: object, placement: Placement = PLACEMENT) -> list[list[int]]:
    problems = Problems()
    table = counts_of(value, placement, problems, ("recompute",))
    assert table is not None, problems.errors
    return table


@pytest.mark.parametrize(
    ("layer_list", "value", "expected"),
    [
        (PLACEMENT, [2, 1, 0, 0, 0], [[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]),
        (placed(10, 2, 3, [[1, 0], [1, 1], [1, 0]]), [4, 3], [[2, 1], [1, 1], [1, 1]]),
        (placed(10, 2, 3, [[-1, 1], [2, 1], [1, 0]]), [4, 3], [[0, 1], [2, 1], [2, 1]]),
        (placed(8, 2, 2, 0), [True, False], [[2, 0], [2, 0]]),
        (placed(8, 2, 2, 0), [[100, 1], [0, 9]], [[2, 1], [0, 2]]),
        (placed(8, 2, 2, 0), [[1, 1], True], [[1, 1], [2, 2]]),
        (placed(8, 2, 2, 0), [], [[0, 0], [0, 0]]),
        (placed(8, 2, 2, 0), ((1, 2), (1, 0)), [[1, 2], [1, 0]]),
    ],
)
def test_every_value_form_becomes_a_table(layer_list: Placement, value: object, expected: list[list[int]]) -> None:
    assert counts(value, layer_list) == expected


@given(st.lists(st.one_of(st.integers(0, 12), st.booleans()), max_size=5))
def test_normalising_is_idempotent(value: list[int | bool]) -> None:
    once = counts(value)
    assert counts(once) == once


@given(st.lists(st.lists(st.integers(0, 12), min_size=5, max_size=5), min_size=2, max_size=2))
def test_normalising_tables_is_idempotent(value: list[list[int]]) -> None:
    once = counts(value)
    assert counts(once) == once


@given(st.lists(st.integers(0, 12), max_size=5))
def test_dealing_to_chunks_keeps_the_stages_total(value: list[int]) -> None:
    table = counts(value)
    for stage, wanted in enumerate(value):
        total = sum(row[stage] for row in PLACEMENT.layer_list)
        assert sum(row[stage] for row in table) == min(wanted, total)


@pytest.mark.parametrize(
    "value",
    [3, None, "full", 1.5, {"a": 1}, [1.0], [1] * 6, [-1], [[1] * 5], [[1] * 5, 2], [[1] * 4, [1] * 5], ["a", 1]],
)
def test_what_counts_no_layers_is_refused(value: object) -> None:
    problems = Problems()
    assert counts_of(value, PLACEMENT, problems, ("recompute",)) is None
    assert len(problems.errors) == 1
    assert problems.errors[0].hint


def test_indices_are_whole_numbers_in_range() -> None:
    assert indices_of([0, 3], 4, Problems(), ()) == [0, 3]
    assert indices_of(True, 4, Problems(), ()) is True
    assert indices_of(False, 4, Problems(), ()) == []
    for value in ([4], [-1], [True], ["0"], [[0]], (0, 1), 3, None):
        problems = Problems()
        assert indices_of(value, 4, problems, ("layers",)) is None
        assert "0 to 3" in problems.errors[0].hint

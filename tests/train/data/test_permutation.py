"""A permutation without a table."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lowtide.train.data.permutation import Permutation

keys = st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 1000))


@given(st.integers(1, 3000), keys)
def test_every_number_is_there_once(size: int, key: tuple[int, int]) -> None:
    assert sorted(Permutation(size, key)(np.arange(size)).tolist()) == list(range(size))


@given(st.integers(2, 2**62), keys, st.data())
def test_a_huge_one_is_computed_number_by_number(size: int, key: tuple[int, int], data: st.DataObject) -> None:
    some = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True))
    permutation = Permutation(size, key)
    together = permutation(np.array(some)).tolist()
    assert len(set(together)) == len(some)
    assert all(0 <= one < size for one in together)
    assert together == [int(permutation(np.array([one]))[0]) for one in some]


def test_neighbours_are_torn_apart() -> None:
    order = Permutation(10_000, (0, 0))(np.arange(10_000))
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.05
    assert np.mean(np.abs(np.diff(order)) == 1) < 0.01

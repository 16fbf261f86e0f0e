"""Random Policies on tiny models: bitwise the run without lowtide, no race, nothing left. The benchmark has more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.policy import Policy
from support.parity_cases import GRID, baseline, case, run_case, trainee
from tide.testing import fresh_tide  # noqa: F401

# Other cases than the benchmark's; every model once at least, in one setting or another.
FIRST = 1_000_000 - 1_000_000 % len(GRID)


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_left() -> Iterator[None]:
    yield
    trainee.cache_clear()  # other tests of this process want the device's memory
    baseline.cache_clear()


@pytest.mark.parametrize("number", range(FIRST, FIRST + len(GRID), 6))
def test_a_random_policy_changes_no_bit_and_leaves_nothing(number: int) -> None:
    outcome = run_case(case(number))
    assert outcome.exact, str(outcome)


def test_random_policies_do_something() -> None:
    outcomes = [run_case(case(FIRST + number)) for number in (2, 3, 12, 15)]
    assert sum(outcome.swaps for outcome in outcomes)
    assert sum(outcome.recomputes for outcome in outcomes)


@settings(max_examples=50)
@given(st.integers(0, 10**7), st.integers(0, 11))
def test_a_case_is_its_number_and_its_policies_survive_json(row: int, cell: int) -> None:
    number = row * len(GRID) + cell  # of two models: each has its operators looked up first
    chosen = case(number)
    assert chosen == case(number)
    for policy in chosen.policies:
        assert Policy.from_json(policy.to_json()) == policy

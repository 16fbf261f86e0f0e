from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import UnitError
from lowtide.units import format_bytes, format_seconds, parse_budget, parse_bytes, parse_seconds


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("24GiB", 24 * 2**30),
        ("58GB", 58 * 10**9),
        ("1.5 KiB", 1536),
        ("7", 7),
        (7, 7),
        (".5MiB", 2**19),
        ("3b", 3),
        ("14G", 14 * 2**30),
        ("40M", 40 * 2**20),
        ("2g", 2**31),
        ("3Gi", 3 * 2**30),
        ("1T", 2**40),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "24 parsecs", "-3GB", "GB", -1, "1e400GB", True, None, "9" * 400 + "TB"])
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(UnitError):
        parse_bytes(text)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [80, "80", " 80 ", 80000])
def test_a_budget_of_a_bare_small_number_is_refused_with_what_to_write(text: str | int) -> None:
    number = int(text)
    with pytest.raises(UnitError, match=rf'is {number} bytes; for {number} GiB write "{number}GiB"'):
        parse_budget(text)


@pytest.mark.parametrize(("text", "size"), [("80GiB", 80 << 30), (80 << 30, 80 << 30), ("80B", 80), ("40M", 40 << 20)])
def test_a_budget_with_a_unit_or_large_enough_is_taken(text: str | int, size: int) -> None:
    assert parse_budget(text) == size


@pytest.mark.parametrize(("text", "seconds"), [("1.5ms", 0.0015), ("2 us", 2e-6), ("3µs", 3e-6), ("2min", 120), (4, 4)])
def test_durations_are_read_as_people_write_them(text: str | float, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5 fortnights", "ms", None])
def test_what_is_no_duration_is_refused(text: object) -> None:
    with pytest.raises(UnitError):
        parse_seconds(text)  # type: ignore[arg-type]


@given(st.integers(0, 2**60))
def test_printed_sizes_read_back_to_four_digits(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=1e-3)


@given(st.floats(1e-9, 1e5))
def test_printed_durations_read_back_to_four_digits(seconds: float) -> None:
    assert parse_seconds(format_seconds(seconds)) == pytest.approx(seconds, rel=1e-3)

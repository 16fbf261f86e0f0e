"""Segments that grow, as with expandable_segments:True."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.planner.allocator import Allocator, Block, Limit, LimitError
from lowtide.planner.expandable import ExpandableAllocator
from support.allocator_programs import MIB, programs, run

SMALL_PAGE, LARGE_PAGE = 2 * MIB, 20 * MIB


@pytest.mark.parametrize(
    ("requests", "reserved"),
    [
        ([1], SMALL_PAGE),
        ([MIB, MIB, 1], 2 * SMALL_PAGE),
        ([MIB + 1], LARGE_PAGE),
        ([9 * MIB, 9 * MIB], LARGE_PAGE),
        ([15 * MIB, 15 * MIB], 2 * LARGE_PAGE),
        ([30 * MIB], 2 * LARGE_PAGE),
        ([30 * MIB, 10 * MIB], 2 * LARGE_PAGE),
        ([1, MIB + 1], SMALL_PAGE + LARGE_PAGE),
    ],
)
def test_pages_are_added_where_a_request_needs_them(requests: list[int], reserved: int) -> None:
    allocator = ExpandableAllocator()
    run(requests, allocator)
    assert allocator.reserved == reserved


def test_a_free_block_at_the_end_grows_by_what_is_missing() -> None:
    allocator = ExpandableAllocator()
    allocator.release(allocator.allocate(35 * MIB))
    assert allocator.reserved == 2 * LARGE_PAGE
    block = allocator.allocate(50 * MIB)
    assert (block.start, block.size, allocator.reserved) == (0, 50 * MIB, 3 * LARGE_PAGE)


def test_segments_of_other_sizes_do_not_lie_idle_as_they_do_without() -> None:
    program = [12 * MIB, -1, 14 * MIB, -1, 16 * MIB, -1, 18 * MIB]
    plain, expandable = Allocator(), ExpandableAllocator()
    run(program, plain)
    run(program, expandable)
    assert plain.reserved == (12 + 14 + 16 + 18) * MIB
    assert expandable.reserved == LARGE_PAGE


def test_of_a_large_block_all_that_is_left_is_split_off() -> None:
    allocator = ExpandableAllocator()
    allocator.release(allocator.allocate(12 * MIB))
    assert allocator.allocate(12 * MIB - 512).size == 12 * MIB - 512


def test_the_block_that_can_grow_is_taken_only_if_no_other_is_large_enough() -> None:
    allocator = ExpandableAllocator()
    hole, _, last = (allocator.allocate(size * MIB) for size in (9, 2, 5))
    allocator.release(hole)
    allocator.release(last)  # with the rest of the page it is the last 9 MiB, and can grow
    assert allocator.allocate(8 * MIB).start == 0
    assert allocator.allocate(8 * MIB).start == 11 * MIB


def test_pages_that_lie_in_free_blocks_are_given_back_and_filled_again() -> None:
    allocator = ExpandableAllocator(Limit(5 * LARGE_PAGE))
    first, _, _ = (allocator.allocate(size * MIB) for size in (50, 10, 35))
    assert allocator.reserved == 5 * LARGE_PAGE
    allocator.release(first)
    allocator.allocate(600)  # small ones have pages of their own: two of the three pages that first had are given back
    assert (allocator.retries, allocator.reserved) == (1, 3 * LARGE_PAGE + SMALL_PAGE)
    with pytest.raises(LimitError):
        allocator.allocate(25 * MIB)  # two pages, for which 2 MiB are missing
    assert allocator.allocate(15 * MIB).start == 0  # the addresses are still the first
    assert allocator.reserved == 4 * LARGE_PAGE + SMALL_PAGE


def test_what_no_page_is_left_for_is_refused() -> None:
    allocator = ExpandableAllocator(Limit(3 * LARGE_PAGE))
    kept = allocator.allocate(45 * MIB)
    with pytest.raises(LimitError):
        allocator.allocate(20 * MIB)
    assert allocator.allocate(15 * MIB).size == 15 * MIB
    allocator.release(kept)
    strict = ExpandableAllocator(Limit(LARGE_PAGE, gives_back=False))
    strict.release(strict.allocate(1))
    with pytest.raises(LimitError):
        strict.allocate(19 * MIB)


@settings(max_examples=300, deadline=None)
@given(programs, st.one_of(st.none(), st.integers(1, 12)))
def test_blocks_in_use_never_overlap_and_every_page_is_counted(program: list[int], pages: int | None) -> None:
    allocator = ExpandableAllocator(None if pages is None else Limit(pages * LARGE_PAGE))
    live: list[Block] = []
    for step in program:
        try:
            if step >= 0:
                live.append(allocator.allocate(step))
        except LimitError:
            continue
        if step < 0 and live:
            allocator.release(live.pop(step % len(live)))
        assert allocator.allocated == sum(block.size for block in live) <= allocator.peak
        assert allocator.allocated <= allocator.reserved <= allocator.most_reserved
        assert pages is None or allocator.most_reserved <= pages * LARGE_PAGE
    for small in (True, False):
        own = sorted((block for block in live if block.small is small), key=lambda block: block.start)
        for one, other in pairwise(own):
            assert one.start + one.size <= other.start
    used = {(block.small, page) for block in live for page in _pages(block)}
    assert allocator.reserved >= sum(SMALL_PAGE if small else LARGE_PAGE for small, _ in used)
    for block in live:
        allocator.release(block)
    assert allocator.allocated == 0


def _pages(block: Block) -> range:
    page = SMALL_PAGE if block.small else LARGE_PAGE
    return range(block.start // page, -(-(block.start + block.size) // page))


@settings(max_examples=100, deadline=None)
@given(programs)
def test_a_limit_that_is_not_met_changes_nothing(program: list[int]) -> None:
    plain = ExpandableAllocator()
    places = [block.start for block in run(program, plain)]
    limited = ExpandableAllocator(Limit(plain.reserved))
    assert [block.start for block in run(program, limited)] == places
    assert (limited.reserved, limited.retries) == (plain.reserved, 0)

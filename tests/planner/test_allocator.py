"""The imagined allocator does what CUDA's rules say."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings

from lowtide.planner.allocator import Allocator, Block, Limit, LimitError
from support.allocator_programs import MIB, programs, run


def test_a_request_is_rounded_to_512_bytes_and_an_empty_one_takes_a_block_too() -> None:
    allocator = Allocator()
    assert [allocator.allocate(size).size for size in (0, 1, 512, 513)] == [512, 512, 512, 1024]


def test_segments_have_the_sizes_of_their_requests() -> None:
    for request, segment in (
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
    ):
        allocator = Allocator()
        allocator.allocate(request)
        assert allocator.reserved == segment


def test_what_is_left_of_a_large_block_is_split_off_only_above_1_mib() -> None:
    allocator = Allocator()
    allocator.release(allocator.allocate(12 * MIB))
    assert allocator.allocate(11 * MIB).size == 12 * MIB
    allocator = Allocator()
    allocator.release(allocator.allocate(14 * MIB))
    assert allocator.allocate(11 * MIB).size == 11 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken_and_the_first_of_two_alike() -> None:
    allocator = Allocator()
    blocks = [allocator.allocate(size * 512) for size in (4, 1, 2, 1, 2, 1)]
    first, second = blocks[2], blocks[4]
    for block in (second, first, blocks[0]):
        allocator.release(block)
    assert allocator.allocate(1024) is first
    assert allocator.allocate(1024) is second


def test_segments_that_are_wholly_free_are_given_back_before_the_device_is_out_of_memory() -> None:
    allocator = Allocator(Limit(40 * MIB))
    first, second = allocator.allocate(12 * MIB), allocator.allocate(26 * MIB)
    allocator.release(first)
    third = allocator.allocate(14 * MIB)  # 12 MiB are cached and 2 MiB are left: too little by themselves
    assert (allocator.reserved, allocator.most_reserved, allocator.retries) == (40 * MIB, 40 * MIB, 1)
    assert third.start == second.start + second.size
    allocator.release(second)
    assert allocator.allocate(26 * MIB) is second  # what is not in the way stays
    assert allocator.retries == 1


def test_a_segment_of_which_a_block_is_in_use_is_not_given_back() -> None:
    allocator = Allocator(Limit(32 * MIB))
    first, _ = allocator.allocate(9 * MIB), allocator.allocate(9 * MIB)  # both are in one segment of 20 MiB
    allocator.release(first)
    with pytest.raises(LimitError):
        allocator.allocate(14 * MIB)
    assert (allocator.reserved, allocator.retries) == (20 * MIB, 1)
    assert allocator.allocate(12 * MIB).size == 12 * MIB


def test_small_segments_are_given_back_for_a_large_one() -> None:
    allocator = Allocator(Limit(12 * MIB))
    allocator.release(allocator.allocate(1000))
    allocator.allocate(12 * MIB)
    assert (allocator.reserved, allocator.most_reserved) == (12 * MIB, 12 * MIB)


def test_nothing_is_given_back_where_only_the_question_is_whether_it_fits() -> None:
    allocator = Allocator(Limit(40 * MIB, gives_back=False))
    allocator.release(allocator.allocate(12 * MIB))
    with pytest.raises(LimitError):
        allocator.allocate(30 * MIB)
    assert allocator.retries == 0


@settings(max_examples=100, deadline=None)
@given(programs)
def test_a_limit_that_is_not_met_changes_nothing(program: list[int]) -> None:
    plain = Allocator()
    run(program, plain)
    limited = Allocator(Limit(plain.reserved))
    assert [block.start for block in run(program, limited)] == [block.start for block in run(program, Allocator())]
    assert (limited.reserved, limited.peak, limited.retries) == (plain.reserved, plain.peak, 0)
    assert plain.most_reserved == plain.reserved


@settings(max_examples=200, deadline=None)
@given(programs)
def test_blocks_in_use_never_overlap_and_what_is_in_use_is_their_sum(program: list[int]) -> None:
    allocator = Allocator()
    live = sorted(run(program, allocator), key=lambda block: block.start)
    assert allocator.allocated == sum(block.size for block in live) <= allocator.peak <= allocator.reserved
    for one, other in pairwise(live):
        assert one.start + one.size <= other.start


@settings(max_examples=100, deadline=None)
@given(programs)
def test_freed_memory_is_reused_before_more_is_reserved(program: list[int]) -> None:
    allocator = Allocator()
    for block in run(program, allocator):
        allocator.release(block)
    assert allocator.allocated == 0
    reserved = allocator.reserved
    # Every segment is whole again, so the same program fits into them. The second time blocks may lie otherwise.
    run([step for step in program if step >= 0][:1], allocator)
    assert allocator.reserved == reserved


def test_the_virtual_accelerators_allocator_agrees_byte_by_byte() -> None:
    torch = pytest.importorskip("torch")
    tide = pytest.importorskip("tide")
    tide.configure(preset="h100", poison=False)
    torch.accelerator.empty_cache()
    before, reserved = torch.accelerator.memory_allocated(), torch.accelerator.memory_reserved()
    chance, allocator, live = random.Random(0), Allocator(), []
    for _ in range(600):
        if chance.random() < 0.55 or not live:
            size = chance.choice([chance.randint(1, 4096), chance.randint(1, 2 * MIB), chance.randint(1, 30 * MIB)])
            live.append((torch.empty(size, dtype=torch.uint8, device="tide"), allocator.allocate(size)))
        else:
            allocator.release(live.pop(chance.randrange(len(live)))[1])
        if before == reserved == 0:  # otherwise another test's tensors live in its segments
            assert allocator.reserved == torch.accelerator.memory_reserved()
            assert allocator.allocated == torch.accelerator.memory_allocated()


def test_the_virtual_accelerators_allocator_gives_back_the_same_segments_at_the_same_requests() -> None:
    torch = pytest.importorskip("torch")
    tide = pytest.importorskip("tide")
    capacity = 160 * MIB
    tide.configure(preset="h100", poison=False, capacity=capacity)
    torch.accelerator.empty_cache()
    if torch.accelerator.memory_reserved():
        pytest.skip("another test's tensors live in its segments")
    chance, allocator, failed = random.Random(1), Allocator(Limit(capacity)), 0
    live: list[tuple[object, Block]] = []
    for _ in range(1500):
        if chance.random() < 0.55 or not live:
            size = chance.choice([chance.randint(1, 4096), chance.randint(1, 2 * MIB), chance.randint(1, 30 * MIB)])
            try:
                block = allocator.allocate(size)
            except LimitError:
                failed += 1
                with pytest.raises(torch.OutOfMemoryError):
                    torch.empty(size, dtype=torch.uint8, device="tide")
            else:
                live.append((torch.empty(size, dtype=torch.uint8, device="tide"), block))
        else:
            allocator.release(live.pop(chance.randrange(len(live)))[1])
        assert allocator.reserved == torch.accelerator.memory_reserved()
        assert allocator.allocated == torch.accelerator.memory_allocated()
    assert allocator.retries > 20
    assert 0 < failed < allocator.retries

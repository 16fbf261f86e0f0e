"""Every sample once an epoch, whichever rank reads it and however often the run is interrupted."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import ConfigError
from lowtide.train.data import Batches, Sample, Synthetic


@dataclass(frozen=True)
class Numbers:
    """A source whose samples are their numbers."""

    count: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int, /) -> Sample:
        return Sample(torch.tensor([index]), torch.tensor([index + 1]))


def step_of(count: int, consumed: int, *, ranks: int, size: int, per_step: int, seed: int = 0) -> list[list[int]]:
    """The samples of one step, for each micro-step those of all ranks in order."""
    parts = []
    for rank in range(ranks):
        batches = Batches(
            Numbers(count), batch_size=size, data_rank=rank, data_ranks=ranks, seed=seed, samples_per_step=per_step
        )
        parts.append([batch.sample_ids for batch in batches.for_step(consumed)])
        batches.close()
    return [[one for part in micro for one in part] for micro in zip(*parts, strict=True)]


layouts = st.sampled_from([(1, 1), (1, 2), (2, 1), (3, 2), (4, 3), (6, 2), (12, 1), (1, 12), (2, 6)])
"""Ranks and batch sizes that divide a step of 12 samples."""


@settings(max_examples=40)
@given(st.integers(12, 100), st.lists(layouts, min_size=1, max_size=9), st.integers(0, 2**63 - 1))
def test_every_sample_is_used_once_an_epoch_over_any_change_of_ranks(
    count: int, changes: list[tuple[int, int]], seed: int
) -> None:
    used: list[list[int]] = [[], []]
    steps = count // 12
    for number in range(2 * steps):  # the run is stopped after each step and goes on with other ranks
        ranks, size = changes[number % len(changes)]
        step = step_of(count, number * 12, ranks=ranks, size=size, per_step=12, seed=seed)
        used[number // steps] += [one for micro in step for one in micro]
    for epoch in used:
        assert len(epoch) == steps * 12
        assert len(set(epoch)) == len(epoch)
        assert set(epoch) <= set(range(count))
        if count % 12 == 0:
            assert set(epoch) == set(range(count))


@given(layouts, st.integers(0, 20))
def test_a_step_has_the_same_samples_in_every_layout(layout: tuple[int, int], number: int) -> None:
    ranks, size = layout
    alone = step_of(100, number * 12, ranks=1, size=12, per_step=12)
    split = step_of(100, number * 12, ranks=ranks, size=size, per_step=12)
    assert [one for micro in split for one in micro] == alone[0]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    first = step_of(96, 0, ranks=1, size=12, per_step=96)
    assert first != step_of(96, 96, ranks=1, size=12, per_step=96)
    assert first != step_of(96, 0, ranks=1, size=12, per_step=96, seed=1)


def test_samples_come_in_order_without_shuffling() -> None:
    batches = Batches(Numbers(10), batch_size=2, data_rank=1, data_ranks=2, seed=0, samples_per_step=4, shuffle=False)
    assert [batches.for_step(consumed)[0].sample_ids for consumed in (0, 4, 8)] == [[2, 3], [6, 7], [2, 3]]
    assert batches.steps_per_epoch == 2
    assert [batches.epoch(consumed) for consumed in (0, 4, 8)] == [0, 0, 1]
    batches.close()


def test_without_dropping_an_epoch_flows_into_the_next() -> None:
    batches = Batches(
        Numbers(10),
        batch_size=4,
        data_rank=0,
        data_ranks=1,
        seed=0,
        samples_per_step=4,
        shuffle=False,
        drop_remainder=False,
    )
    assert [batches.for_step(consumed)[0].sample_ids for consumed in (4, 8)] == [[4, 5, 6, 7], [8, 9, 0, 1]]
    batches.close()


@given(st.integers(30, 200), st.integers(1, 15), st.integers(1, 15), st.integers(0, 40))
def test_a_changed_size_of_steps_keeps_the_place_in_the_epoch(count: int, before: int, after: int, done: int) -> None:
    def made(size: int) -> Batches:
        return Batches(Numbers(count), batch_size=size, data_rank=0, data_ranks=1, seed=0, samples_per_step=size)

    consumed = done * before
    old, new = made(before), made(after)
    place = new.restored(old.state(consumed))
    seen = consumed % old.epoch_samples
    assert place % new.epoch_samples == min(seen, new.epoch_samples) % new.epoch_samples
    assert new.restored(new.state(place)) == place


def test_reading_ahead_gives_what_reading_from_scratch_gives() -> None:
    source = Synthetic(100, 6, 50, seed=3)

    def made(workers: int = 0, prefetch: int | None = None) -> Batches:
        return Batches(
            source,
            batch_size=2,
            data_rank=1,
            data_ranks=2,
            seed=5,
            samples_per_step=8,
            workers=workers,
            prefetch=prefetch,
        )

    ahead, far_ahead, workers = made(), made(prefetch=5), made(workers=1, prefetch=3)
    for consumed in (0, 8, 16, 80, 88, 0):  # also a jump, as after going back to a checkpoint
        fresh = made()
        for other in (ahead, far_ahead, workers) if consumed else (ahead, far_ahead):  # a worker starts slowly
            for one, two in zip(fresh.for_step(consumed), other.for_step(consumed), strict=True):
                assert one.sample_ids == two.sample_ids
                assert torch.equal(one.tokens, two.tokens)
                assert torch.equal(one.labels, two.labels)
        fresh.close()
    assert (len(ahead._ahead), len(far_ahead._ahead)) == (1, 3)  # steps of two micro-batches
    for one_more in (ahead, far_ahead, workers):
        one_more.close()


def test_what_cannot_be_read_is_raised_where_it_is_wanted() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int, /) -> Sample:
            if index >= 4:
                raise OSError("gone")
            return super().__getitem__(index)

    batches = Batches(Broken(8), batch_size=4, data_rank=0, data_ranks=1, seed=0, samples_per_step=4, shuffle=False)
    batches.for_step(0)
    with pytest.raises(OSError, match="gone"):
        batches.for_step(4)
    batches.close()


@pytest.mark.parametrize(("per_step", "message"), [(6, "multiple of 4"), (104, "has 100 samples, a step takes 104")])
def test_a_step_that_cannot_be_made_is_an_error(per_step: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Batches(Numbers(100), batch_size=2, data_rank=0, data_ranks=2, seed=0, samples_per_step=per_step)


def test_nothing_grows_with_the_data() -> None:
    huge = Batches(Numbers(2**50), batch_size=4, data_rank=3, data_ranks=10_000, seed=0, samples_per_step=40_000)
    before = time.perf_counter()
    (batch,) = huge.for_step(40_000 * 10**9)
    assert len(set(batch.sample_ids)) == 4
    assert time.perf_counter() - before < 5
    huge.close()

"""Operators are watched in steps that give a reason, and in no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tide
from lowtide._torch_private.memory import MemoryStats
from lowtide.adaptive.rescue import Rescue
from lowtide.adaptive.suspicion import WATCHED, Suspicion
from support.ranks import Ranks
from support.watched_loop import PLANNED, PROFILING, ROWS, WIDTH, Loop, one_rank_is_short
from tide import faults


@pytest.fixture
def loop() -> Iterator[Loop]:
    yield Loop()
    faults.disarm()
    tide.configure(capacity=1 << 30)


def settled(loop: Loop) -> None:
    for _ in range(PLANNED):
        loop.step()
    assert all(loop.model.watched[:PROFILING])
    assert not loop.model.watched[-1]


@pytest.mark.parametrize("given", [True, False])
def test_nothing_is_on_the_operators_path_once_a_plan_holds(loop: Loop, given: bool) -> None:
    run = loop.adapt()
    if given:
        for _ in range(PLANNED + 10):
            run.step(loop.step)
        run.remove()
    else:
        with run:
            for _ in range(PLANNED + 10):
                loop.step()
    assert loop.model.watched == [number < PLANNED - 1 for number in range(PLANNED + 10)]


def test_all_steps_are_watched_if_that_is_asked_for(loop: Loop) -> None:
    with loop.adapt(watch="always"):
        for _ in range(PLANNED + 10):
            loop.step()
    assert all(loop.model.watched)


def test_a_larger_batch_is_a_reason_once(loop: Loop) -> None:
    with loop.adapt():
        settled(loop)
        assert not loop.was_watched(ROWS // 2)
        assert loop.was_watched(2 * ROWS)
        assert not loop.was_watched()
        assert not loop.was_watched(2 * ROWS)


def test_a_larger_batch_that_does_not_fit_is_rescued(loop: Loop) -> None:
    large = 4096
    plain = Loop()
    for _ in range(PLANNED):
        plain.step()
    plain.step(large)
    loop = Loop()
    with loop.adapt() as run:
        settled(loop)
        faults.shrink_capacity(24, 1 << 20)
        loop.step(large)
        faults.disarm()
        assert "rescued" in [event.kind for event in run.events]
        assert all(loop.was_watched() for _ in range(WATCHED))  # memory was short
        while loop.was_watched():
            assert loop.number < 40
    assert loop.losses[: len(plain.losses)] == plain.losses


def test_a_neighbour_that_takes_memory_is_a_reason_as_long_as_it_does(loop: Loop) -> None:
    with loop.adapt():
        settled(loop)
        loop.step()
        needed = torch.accelerator.max_memory_reserved()
        tide.configure(capacity=needed + (1 << 19))
        assert loop.was_watched()
        tide.configure(capacity=1 << 30)
        assert not loop.was_watched()


def test_a_step_that_gave_no_reason_ends_in_the_plain_error_and_says_what_to_do(loop: Loop) -> None:
    with pytest.raises(torch.OutOfMemoryError) as error, loop.adapt():  # noqa: PT012
        settled(loop)
        faults.shrink_capacity(10, 1 << 20)
        loop.step()
    assert "watch='always'" in "\n".join(error.value.__notes__)


def test_the_error_of_a_step_that_was_watched_says_nothing_of_the_kind(loop: Loop) -> None:
    with pytest.raises(torch.OutOfMemoryError) as error, loop.adapt(watch="always"):  # noqa: PT012
        loop.step()
        raise torch.OutOfMemoryError("the loop's own")
    assert not hasattr(error.value, "__notes__")


def test_a_step_that_is_given_and_gave_no_reason_is_retried(loop: Loop) -> None:
    plain = Loop()
    for _ in range(PLANNED + 2):
        plain.step()
    loop = Loop()
    run = loop.adapt()
    for _ in range(PLANNED):
        run.step(loop.step)

    def failing() -> float:
        if loop.number == PLANNED:
            faults.shrink_capacity(10, 1 << 20)
        else:
            faults.disarm()
            loop.number -= 1
        return loop.step()

    run.step(failing)
    run.step(loop.step)
    assert "retried" in [event.kind for event in run.events]
    run.remove()
    assert loop.losses == plain.losses


def test_the_loop_that_goes_on_after_an_error_is_watched(loop: Loop) -> None:
    with loop.adapt():
        settled(loop)
        faults.shrink_capacity(10, 1 << 20)
        with pytest.raises(torch.OutOfMemoryError):
            loop.step()
        faults.disarm()
        loop.step()  # the same step to the run, which none of its hooks has seen end
        assert loop.was_watched()


def test_a_batch_is_larger_if_any_dimension_of_any_input_is() -> None:
    suspicion = Suspicion()

    class Still:
        """A clock on which nothing happens."""

        ended_with = MemoryStats(0, 0, 0, 0, 0)

        def memory(self) -> MemoryStats:
            return self.ended_with

        def capacity(self) -> None:
            return None

    clock: Any = Still()

    def larger(*shapes: tuple[int, ...]) -> bool:
        found = bool(suspicion.at_door(0, 1, [torch.empty(shape, device="meta") for shape in shapes], clock))
        suspicion.ended(0, 1, clock, failed=False)
        return found

    assert larger((2, 8))
    assert not larger((2, 8))
    assert larger((1, 16))
    assert not larger((1, 12))
    assert larger((2, 9))
    assert larger((2, 8), (1,))
    assert larger((16,))
    assert not larger((1, 16))


def test_a_rank_that_is_short_rescues_itself_and_the_others_join_at_the_next_query(ranks: Ranks) -> None:
    plain = ranks.run(one_rank_is_short, -1)
    found = ranks.run(one_rank_is_short, 1)
    assert [losses for _, losses, _ in found] == [losses for _, losses, _ in plain]
    assert "rescued" in found[1][2]
    assert "rescued" not in found[0][2]
    watched = found[0][0]
    assert not watched[PLANNED]  # the first rank's own step went on as before
    assert any(watched[PLANNED + 1 :])


def test_a_scaler_that_was_given_unscales_again_in_its_first_step(loop: Loop) -> None:
    scaler = torch.amp.GradScaler("tide", init_scale=4.0)
    rescue = Rescue(loop.model, [loop.optimizer], scalers=[scaler])
    attempts = []

    def step() -> None:
        attempts.append(1)
        x = torch.ones(ROWS, WIDTH, device="tide")
        loop.optimizer.zero_grad()
        scaler.scale(loop.model(x)).backward()
        scaler.unscale_(loop.optimizer)
        if len(attempts) == 1:
            raise torch.OutOfMemoryError("out of memory")  # no kernel had seen the scaler: nothing is armed
        scaler.step(loop.optimizer)
        scaler.update()

    rescue.run(step)
    rescue.remove()
    assert len(attempts) == 2

"""The clocks: what overlaps, and what waits for what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide.cost.devices import find_device
from lowtide.planner.lanes import Lanes
from lowtide.planner.rank import Timed
from lowtide.trace.trace import Sync

DEVICE = replace(find_device("h100"), launch=0.0)
GATHER, REDUCE = 1, 2


@pytest.fixture
def lanes() -> Lanes:
    return Lanes(DEVICE)


def test_a_gather_ahead_overlaps_the_computation_that_does_not_need_it(lanes: Lanes) -> None:
    lanes.run(Timed(3.0, stream=GATHER, group="group 2:1"))
    lanes.sync(Sync(GATHER, "gathered", waits=False))
    lanes.run(Timed(2.0))
    assert lanes.computation == 2.0
    lanes.sync(Sync(0, "gathered"))
    assert lanes.computation == 3.0
    assert lanes.busy == 2.0


def test_collectives_of_one_group_run_one_after_the_other_and_those_of_two_at_once(lanes: Lanes) -> None:
    assert lanes.run(Timed(3.0, stream=GATHER, group="group 2:1")) == 0.0
    assert lanes.run(Timed(3.0, stream=REDUCE, group="group 2:1")) == 3.0
    assert lanes.run(Timed(3.0, stream=3, group="group 2:2")) == 0.0


def test_a_collective_that_is_not_waited_for_holds_nobody_up_until_it_is(lanes: Lanes) -> None:
    lanes.run(Timed(4.0, group="group 2:1", waited=False))
    lanes.run(Timed(1.0))
    assert lanes.computation == 1.0
    lanes.sync(Sync(0, "group 2:1"))
    assert lanes.computation == 4.0


def test_a_stream_waits_for_all_that_another_was_given(lanes: Lanes) -> None:
    lanes.run(Timed(2.0))
    lanes.sync(Sync(REDUCE, other=0))
    assert lanes.run(Timed(1.0, stream=REDUCE)) == 2.0
    assert lanes.at(REDUCE) == 3.0
    assert lanes.computation == 2.0


def test_the_latest_event_of_a_place_counts(lanes: Lanes) -> None:
    for _ in range(2):
        lanes.run(Timed(1.0, stream=GATHER))
        lanes.sync(Sync(GATHER, "gathered", waits=False))
    lanes.sync(Sync(0, "gathered"))
    assert lanes.computation == 2.0

"""When a plan is taken to be wrong, and when there may be another."""

from __future__ import annotations

from lowtide.adaptive.lengths import Shape
from lowtide.adaptive.plan_monitor import FORGIVING, LEAST_LOST, PATIENT, SETTLING, PlanMonitor

MEBIBYTE = 1 << 20


ALL = (8, 128)
SHORT, LONG = (1, 256), (1, 512)
CAPACITY = 1000 * MEBIBYTE


def watched(bucket: Shape = ALL, step: int = 10) -> PlanMonitor:
    monitor = PlanMonitor(error=0.05, replan_every=20)
    monitor.planned(bucket, step, CAPACITY)
    return monitor


def test_memory_above_the_plan_counts_only_after_some_steps_in_a_row() -> None:
    monitor = watched()
    more, planned = 110 * MEBIBYTE, 100 * MEBIBYTE
    assert [monitor.wrong(ALL, more, planned) for _ in range(PATIENT - 1)] == [""] * (PATIENT - 1)
    assert monitor.wrong(ALL, planned, planned) == ""  # one that is as planned resets the count
    assert [monitor.wrong(ALL, more, planned) for _ in range(PATIENT - 1)] == [""] * (PATIENT - 1)
    assert monitor.wrong(ALL, more, planned) == "110 MiB allocated where 100 MiB were planned"
    assert monitor.lost == {ALL: 10 * MEBIBYTE}


def test_memory_within_the_error_is_as_planned() -> None:
    monitor = watched()
    assert {monitor.wrong(ALL, 105, 100) for _ in range(2 * PATIENT)} == {""}


def test_missing_memory_counts_at_once_and_for_its_length_alone() -> None:
    monitor = watched(SHORT)
    monitor.missed(SHORT, 10 + SETTLING, MEBIBYTE, CAPACITY)  # the switch itself
    assert monitor.wrong(SHORT, 1, 1) == ""
    monitor.missed(SHORT, 12, MEBIBYTE, CAPACITY)
    assert monitor.lost == {SHORT: LEAST_LOST}
    assert monitor.wrong(LONG, 1, 1) == ""
    assert monitor.wrong(SHORT, 1, 1) == "memory was missing"
    monitor.missed(SHORT, 13, 2 * LEAST_LOST, CAPACITY)
    assert monitor.lost == {SHORT: 3 * LEAST_LOST}
    monitor.planned(SHORT, 13, CAPACITY)
    assert monitor.wrong(SHORT, 1, 1) == ""
    assert monitor.lost == {SHORT: 3 * LEAST_LOST}, "the next plan needs to know it"


def test_plans_follow_each_other_less_and_less_often() -> None:
    monitor = watched(step=0)
    waits = []
    for _ in range(6):
        waits.append(next(step for step in range(100) if monitor.may_replan(step)))
        monitor.replans += 1
    assert waits == [2, 4, 8, 16, 20, 20]


def test_what_another_process_has_taken_is_no_fault_of_the_plan() -> None:
    monitor = watched()
    monitor.missed(ALL, 20, MEBIBYTE, CAPACITY - 50 * MEBIBYTE)
    assert monitor.wrong(ALL, 1, 1) == "memory was missing"
    assert not monitor.lost


def test_a_device_that_gives_more_for_some_steps_has_room() -> None:
    monitor = watched()
    little, much = CAPACITY + CAPACITY // 100, CAPACITY + CAPACITY // 10
    assert not any(monitor.has_room(ALL, step, little) for step in range(20, 40))
    assert [bool(monitor.has_room(ALL, step, much)) for step in range(PATIENT)] == [False] * (PATIENT - 1) + [True]
    monitor.planned(ALL, 50, much)
    assert not monitor.has_room(ALL, 51, much)


def test_what_was_missing_is_forgotten_and_then_remembered_longer() -> None:
    monitor = watched()
    for begin, patience in ((20, FORGIVING), (1000, 2 * FORGIVING), (2000, 4 * FORGIVING)):
        monitor.missed(ALL, begin, MEBIBYTE, CAPACITY)
        assert not monitor.has_room(ALL, begin + patience - 1, CAPACITY)
        assert monitor.has_room(ALL, begin + patience, CAPACITY) == f"no memory was missing for {patience} steps"
        monitor.forgive(ALL)
        assert not monitor.lost
        assert not monitor.has_room(ALL, begin + 2 * patience, CAPACITY)

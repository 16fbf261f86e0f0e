"""When a plan is taken to be wrong, and when there may be another."""

from __future__ import annotations

from lowtide.adaptive.plan_monitor import LEAST_LOST, PATIENT, SETTLING, PlanMonitor

MEBIBYTE = 1 << 20


def watched(length: int = 0, step: int = 10) -> PlanMonitor:
    monitor = PlanMonitor(error=0.05, replan_every=20)
    monitor.planned(length, step)
    return monitor


def test_memory_above_the_plan_counts_only_after_some_steps_in_a_row() -> None:
    monitor = watched()
    more, planned = 110 * MEBIBYTE, 100 * MEBIBYTE
    assert [monitor.wrong(0, more, planned) for _ in range(PATIENT - 1)] == [""] * (PATIENT - 1)
    assert monitor.wrong(0, planned, planned) == ""  # one that is as planned resets the count
    assert [monitor.wrong(0, more, planned) for _ in range(PATIENT - 1)] == [""] * (PATIENT - 1)
    assert monitor.wrong(0, more, planned) == "110 MiB allocated where 100 MiB were planned"
    assert monitor.lost == {0: 10 * MEBIBYTE}


def test_memory_within_the_error_is_as_planned() -> None:
    monitor = watched()
    assert {monitor.wrong(0, 105, 100) for _ in range(2 * PATIENT)} == {""}


def test_missing_memory_counts_at_once_and_for_its_length_alone() -> None:
    monitor = watched(256)
    monitor.missed(256, 10 + SETTLING, MEBIBYTE)  # the switch itself
    assert monitor.wrong(256, 1, 1) == ""
    monitor.missed(256, 12, MEBIBYTE)
    assert monitor.lost == {256: LEAST_LOST}
    assert monitor.wrong(512, 1, 1) == ""
    assert monitor.wrong(256, 1, 1) == "memory was missing"
    monitor.missed(256, 13, 2 * LEAST_LOST)
    assert monitor.lost == {256: 3 * LEAST_LOST}
    monitor.planned(256, 13)
    assert monitor.wrong(256, 1, 1) == ""
    assert monitor.lost == {256: 3 * LEAST_LOST}, "the next plan needs to know it"


def test_plans_follow_each_other_less_and_less_often() -> None:
    monitor = watched(step=0)
    waits = []
    for _ in range(6):
        waits.append(next(step for step in range(100) if monitor.may_replan(step)))
        monitor.replans += 1
    assert waits == [2, 4, 8, 16, 20, 20]

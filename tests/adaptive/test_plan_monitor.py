"""When a plan is taken to be wrong, and when there may be another."""

from __future__ import annotations

from lowtide.adaptive.plan_monitor import LEAST_LOST, PATIENT, SETTLING, PlanMonitor

MEBIBYTE = 1 << 20


def watched(length: int = 0, step: int = 10) -> PlanMonitor:
    watch = PlanMonitor(error=0.05, replan_every=20)
    watch.planned(length, step)
    return watch


def test_memory_above_the_plan_counts_only_after_some_steps_in_a_row() -> None:
    watch = watched()
    more, planned = 110 * MEBIBYTE, 100 * MEBIBYTE
    assert [watch.wrong(0, more, planned, "reserved") for _ in range(PATIENT - 1)] == [""] * (PATIENT - 1)
    assert watch.wrong(0, planned, planned, "reserved") == ""  # one that is as planned begins the count anew
    assert [watch.wrong(0, more, planned, "reserved") for _ in range(PATIENT - 1)] == [""] * (PATIENT - 1)
    assert watch.wrong(0, more, planned, "reserved") == "110 MiB reserved where 100 MiB were planned"
    assert watch.lost == {0: 10 * MEBIBYTE}


def test_memory_within_the_error_is_as_planned() -> None:
    watch = watched()
    assert {watch.wrong(0, 105, 100, "reserved") for _ in range(2 * PATIENT)} == {""}


def test_missing_memory_counts_at_once_and_for_its_length_alone() -> None:
    watch = watched(256)
    watch.missed(256, 10 + SETTLING, MEBIBYTE)  # the switch itself
    assert watch.wrong(256, 1, 1, "allocated") == ""
    watch.missed(256, 12, MEBIBYTE)
    assert watch.lost == {256: LEAST_LOST}
    assert watch.wrong(512, 1, 1, "allocated") == ""
    assert watch.wrong(256, 1, 1, "allocated") == "memory was missing"
    watch.missed(256, 13, 2 * LEAST_LOST)
    assert watch.lost == {256: 3 * LEAST_LOST}
    watch.planned(256, 13)
    assert watch.wrong(256, 1, 1, "allocated") == ""
    assert watch.lost == {256: 3 * LEAST_LOST}, "the next plan needs to know it"


def test_plans_follow_each_other_less_and_less_often() -> None:
    watch = watched(step=0)
    waits = []
    for _ in range(6):
        waits.append(next(step for step in range(100) if watch.may_replan(step)))
        watch.replans += 1
    assert waits == [2, 4, 8, 16, 20, 20]

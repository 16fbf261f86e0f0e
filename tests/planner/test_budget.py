"""How much of a device's memory a plan may use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide.cost.device import Device, Reserve
from lowtide.errors import PlanError
from lowtide.planner.budget import Groups, budget_of, process_groups
from lowtide.planner.make import make_plan
from lowtide.planner.pipeline import even_pipeline
from lowtide.trace.trace import Kernel, Part, Trace
from support.hand_made_traces import DEVICE, llama_trace

GIB = 1 << 30
RESERVE = Reserve(driver=2 * GIB, communication=3 * GIB, all_to_all=5 * GIB, workspace=GIB)
ROOMY = replace(DEVICE, capacity=80 * GIB, reserve=RESERVE)


def with_collectives(trace: Trace, *kernels: Kernel) -> Trace:
    first: Part = trace.parts[0]
    return replace(trace, parts=(replace(first, kernels=first.kernels + kernels), *trace.parts[1:]))


def collective(kind: str, ranks: int, stride: int = 1) -> Kernel:
    return Kernel(kind, ranks=ranks, stride=stride, message=1024)


TRACE = llama_trace(4)
SHARED = with_collectives(
    TRACE,
    collective("c10d::allgather_", 8),
    collective("c10d::reduce_scatter_", 8),
    collective("c10d::allreduce_", 8, 8),
    collective("c10d::alltoall_base_", 4),
    collective("c10d::allreduce_", 1),
)


def test_a_process_group_counts_once_whatever_its_collectives_are() -> None:
    assert process_groups(TRACE) == Groups(0, 0)
    assert process_groups(SHARED) == Groups(3, 1)


def test_pipeline_stages_have_a_group_of_their_own() -> None:
    assert process_groups(TRACE, even_pipeline(4, 2)) == Groups(1, 0)
    assert process_groups(replace(SHARED, pipeline=even_pipeline(4, 2))) == Groups(4, 1)


def test_the_budget_is_what_the_driver_workspaces_and_each_group_leave() -> None:
    assert budget_of(ROOMY, TRACE).bytes == (80 - 2 - 1) * GIB
    shared = budget_of(ROOMY, SHARED)
    assert shared.bytes == (80 - 2 - 1 - 2 * 3 - 5) * GIB
    assert "2 GiB for the driver, 1 GiB for workspaces, 3 GiB for each of 2 process groups" in shared.note
    assert "5 GiB for the process group with all-to-alls" in shared.note


def test_a_budget_that_is_given_stays_and_the_note_says_what_is_left() -> None:
    given = budget_of(ROOMY, SHARED, budget=79 * GIB)
    assert given.bytes == 79 * GIB
    assert "the budget was given; of the 80 GiB" in given.note
    assert "66 GiB are left" in given.note


def test_a_reserve_that_is_given_is_all_that_is_kept_back() -> None:
    assert budget_of(ROOMY, SHARED, reserve=4 * GIB).bytes == 76 * GIB
    assert budget_of(ROOMY, SHARED, reserve=0).bytes == 80 * GIB


@pytest.mark.parametrize("device", [replace(ROOMY, capacity=2 * GIB), replace(ROOMY, capacity=GIB)])
def test_a_device_of_which_nothing_is_left_is_refused(device: Device) -> None:
    with pytest.raises(PlanError, match=r"nothing is left of the .*: 3 GiB are reserved .* give a smaller --reserve"):
        budget_of(device, TRACE)


def test_the_plan_says_what_was_assumed_for_its_budget() -> None:
    budget = budget_of(ROOMY, TRACE)
    plan = make_plan(TRACE, budget, ROOMY)
    assert plan.budget == budget.bytes
    assert budget.note in plan.notes

"""The solver and the simulator agree on a stage: a feasible one is found, however roughly the solver answers."""

from __future__ import annotations

from lowtide.cost.kernel import kernel_seconds
from lowtide.planner.pipeline import even_pipeline
from lowtide.planner.problem import stage_problems
from lowtide.planner.repair import fit_stage
from lowtide.planner.simulation import StageSimulation
from lowtide.planner.solve import StageSolution, solve_least, solve_stage
from support.hand_made_traces import DEVICE, llama_trace

MIB = 1 << 20
(PROBLEM,) = stage_problems(llama_trace(8), DEVICE, even_pipeline(8), lambda kernel: kernel_seconds(DEVICE, kernel))
LEAST = solve_least(PROBLEM, swap=False)


def simulated(solution: StageSolution, reserved: int) -> StageSimulation:
    return StageSimulation(
        stage=0, peak=reserved, reserved=reserved, static=0, seconds=solution.seconds, busy=solution.seconds
    )


def between() -> tuple[int, StageSolution]:
    """A budget, and what the solver makes of it, with some of it unused."""
    everything = LEAST.memory + sum(len(group.layers) * group.cost.saved for group in PROBLEM.groups)
    for step in range(1, 40):
        budget = LEAST.memory + (everything - LEAST.memory) * step // 40
        solution = solve_stage(PROBLEM, budget, swap=False)
        if solution is not None and LEAST.memory < solution.memory < budget - 64:
            return budget, solution
    raise AssertionError("every solution uses its budget to the last byte")


def test_counts_that_are_over_by_a_byte_are_not_found_again_until_the_rounds_are_over() -> None:
    target, first = between()
    budget = first.memory - 1  # by the simulator, which is asked for the solver's own bytes
    found = fit_stage(
        PROBLEM, budget, lambda one: simulated(one, one.memory), offset=budget - target, swap=False, rounds=2
    )
    assert found.best is not None
    assert found.best.simulated.reserved <= budget
    assert found.best.solution != LEAST


def test_where_nothing_else_fits_the_counts_that_need_least_memory_are_tried() -> None:
    target, _ = between()

    def simulate(solution: StageSolution) -> StageSimulation:
        return simulated(solution, target if solution.memory <= LEAST.memory else target + 1)

    found = fit_stage(PROBLEM, target, simulate, swap=False, rounds=2)
    assert found.best is not None
    assert found.best.solution.memory == LEAST.memory

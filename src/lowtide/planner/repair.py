"""Make the solver and the simulator agree on a stage: the solver's budget is moved until the simulated one is met.

The solver's model leaves out what the allocator loses, what copies under way occupy, and some of what passes. So the
solver has a budget of its own. If the simulated stage is over, the budget is lowered by the excess; if there is room,
it is raised by the room; between a budget that did and one that did not fit, it is halved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lowtide.planner.linear_program import GAP
from lowtide.planner.problem import StageProblem
from lowtide.planner.simulation import StageSimulation
from lowtide.planner.solve import StageSolution, solve_least, solve_stage

__all__ = ["Fitted", "Try", "fit_stage"]

CLOSE = 2e-3
"""A simulated stage this near to its budget, as a share of it, is near enough."""
ROUNDS = 6
STALL = 2e-3
SAME = 5e-4
"""So are two budgets between which the solver's time differs by this share."""


class Try(NamedTuple):
    """A solution and what it does when simulated."""

    solution: StageSolution
    simulated: StageSimulation
    target: int
    """The budget that the solver was given."""

    @property
    def stalls(self) -> bool:
        """Whether the computation waits for copies for more than a moment."""
        return self.simulated.stall > STALL * self.simulated.seconds


class Fitted(NamedTuple):
    """What was found for a stage."""

    best: Try | None
    """The fastest that fits; None if none was found."""
    least: Try
    """The one that takes least memory of those that were simulated."""
    ceiling: int
    """The smallest budget of the solver's whose solution did not fit; if all did, the largest that it was given."""
    missed: Try | None = None
    """Of those that did not fit, the one that came nearest."""


def fit_stage(
    problem: StageProblem,
    budget: int,
    simulate: Callable[[StageSolution], StageSimulation],
    *,
    offset: int = 0,
    swap: bool = True,
    recompute: bool = True,
    link_share: float = 1.0,
    close: float = CLOSE,
    rounds: int = ROUNDS,
    good_enough: float = 0.0,
    gap: float = GAP,
) -> Fitted:
    """The fastest counts whose simulated memory is within ``budget``.

    ``offset`` is a guess of how much more than the solver's bytes the simulator will find. It ends after ``rounds``, or
    twice as many if nothing fits by then, or with a share of the budget below ``close`` unused, or with seconds that
    are ``good_enough``. If nothing has fitted at the end, the counts that need least memory are tried. ``gap`` is the
    solver's.
    """
    tries: list[Try] = []
    known: dict[tuple[object, ...], StageSimulation] = {}
    target = budget - offset
    low: Try | None = None
    """The largest budget that did fit, and the smallest that did not."""
    high: Try | None = None
    for number in range(2 * rounds + 1):
        if number >= rounds and any(one.simulated.reserved <= budget for one in tries):
            break
        solution = None
        if number < 2 * rounds:
            solution = solve_stage(problem, target, swap=swap, recompute=recompute, link_share=link_share, gap=gap)
        least = solution is None
        if solution is None:
            solution = solve_least(problem, swap=swap, recompute=recompute)
        key = _key(solution)
        again = key in known
        if not again:
            known[key] = simulate(solution)
        one = Try(solution, known[key], target)
        tries.append(one)
        room = budget - one.simulated.reserved
        nothing_lost = solution.seconds <= problem.seconds and not one.stalls
        if least or (0 <= room < close * budget) or (room >= 0 and nothing_lost):
            break
        if room >= 0 and one.simulated.seconds <= good_enough:
            break
        if room >= 0:
            low = one if low is None or one.target > low.target else low
        else:
            high = one if high is None or one.target < high.target else high
        if low is not None and high is not None:
            if low.solution.seconds - high.solution.seconds < SAME * problem.seconds and not low.stalls:
                break
            target = (low.target + high.target) // 2
        else:
            # If it is over, a little more than that: what the last layer gives up is there again in passing.
            target += room if room >= 0 else room + room // 8
            if again and room < 0:
                # Up to its gap, the solver says the same for many budgets: the next one is less than these counts take.
                target = min(target, solution.memory + room - round(close * budget / 8))
    return _fitted(tries, budget)


def _fitted(tries: list[Try], budget: int) -> Fitted:
    fitting = [one for one in tries if one.simulated.reserved <= budget]
    over = [one for one in tries if one.simulated.reserved > budget]
    nearest = min(over, key=lambda one: one.target) if over else max(tries, key=lambda one: one.target)
    return Fitted(
        min(fitting, key=lambda one: one.simulated.seconds, default=None),
        min(tries, key=_reserved),
        nearest.target,
        min(over, key=_reserved, default=None),
    )


def _reserved(one: Try) -> int:
    return one.simulated.reserved


def _key(solution: StageSolution) -> tuple[object, ...]:
    return tuple(
        (
            counts.whole,
            counts.whole_swapped,
            counts.boundary_swapped,
            tuple(counts.recomputed.items()),
            tuple(counts.swapped.items()),
        )
        for counts in solution.groups
    )

"""A mixed-integer linear program, built row by row and solved by HiGHS.

[Note: fixing by reduced costs]
HiGHS takes 0.2 seconds for a stage and 0.01 for the same program with fractions allowed. The reduced cost of an unknown
that lies at its bound says by how much the best gets worse, at least, for each whole step that it moves away. Those
that would cost more than :data:`NEAR` of the whole are fixed where they are. What is left is solved in some hundredths
of a second. What the program with fractions costs bounds every solution, the fixed ones too: if the one that is found
is within the gap of that, it is the answer. Otherwise the whole program is solved.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

__all__ = ["GAP", "LinearProgram", "load_solver"]

GAP = 5e-4
"""The gap at which HiGHS stops."""
NEAR = 1e-4
"""Unknowns whose reduced cost is a larger share of the whole are fixed first."""
WHOLE = 1e-6
"""What is nearer to a whole number than this is one."""
NODES = 1000
"""Branches after which HiGHS stops with the best that it has. Not seconds: the same question has the same answer."""


def load_solver() -> None:
    """Import the solver, which takes about as long as several stages take to solve."""
    import scipy.optimize  # type: ignore[import-untyped]  # noqa: F401


@contextmanager
def _quiet() -> Iterator[None]:
    """HiGHS writes a line of its own to stdout now and then, where a program may be reading JSON: it is dropped."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


class LinearProgram:
    """What is to be as small as possible, and the rows that hold."""

    def __init__(self) -> None:
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.integer: list[int] = []
        self.cost: dict[int, float] = {}
        self.rows: list[tuple[Mapping[int, float], float, float]] = []
        self.bound = 0.0
        """When it is solved: nothing is smaller."""

    def variable(self, lower: float, upper: float, *, integer: bool = False, cost: float = 0.0) -> int:
        """Add an unknown; its number."""
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(int(integer))
        if cost:
            self.cost[len(self.lower) - 1] = cost
        return len(self.lower) - 1

    def row(self, terms: Mapping[int, float], lower: float, upper: float) -> None:
        """Ask that the sum of ``terms`` lies between ``lower`` and ``upper``."""
        self.rows.append((terms, lower, upper))

    def solve(self, gap: float = GAP) -> list[float] | None:
        """The best values, up to ``gap``; None if there are none."""
        import numpy as np

        matrices = self._matrices()
        if any(self.integer):
            relaxed = _relaxed(matrices)
            if relaxed.x is None:
                return None
            bound = float(relaxed.fun)
            reduced = np.abs(relaxed.lower.marginals + relaxed.upper.marginals)
            whole = np.round(relaxed.x)
            fixed = (matrices.integer == 1) & (np.abs(relaxed.x - whole) < WHOLE) & (reduced > NEAR * abs(bound))
            found = _solved(
                matrices._replace(
                    lower=np.where(fixed, whole, matrices.lower), upper=np.where(fixed, whole, matrices.upper)
                ),
                gap,
            )
            if found.x is not None and found.fun - bound <= gap * abs(found.fun):
                self.bound = bound
                return [float(value) for value in found.x]
        found = _solved(matrices, gap)
        if found.x is None:
            return None
        dual = found.mip_dual_bound
        self.bound = float(found.fun if dual is None else dual)
        return [float(value) for value in found.x]

    def _matrices(self) -> _Matrices:
        import numpy as np
        from scipy.sparse import csr_array  # type: ignore[import-untyped]

        numbers = [
            (row, variable, value) for row, (terms, _, _) in enumerate(self.rows) for variable, value in terms.items()
        ]
        places = ([one[0] for one in numbers], [one[1] for one in numbers])
        cost = np.zeros(len(self.lower))
        for variable, value in self.cost.items():
            cost[variable] = value
        return _Matrices(
            cost,
            np.array(self.lower),
            np.array(self.upper),
            np.array(self.integer),
            csr_array(([one[2] for one in numbers], places), shape=(len(self.rows), len(self.lower))),
            np.array([row[1] for row in self.rows]),
            np.array([row[2] for row in self.rows]),
        )


class _Matrices(NamedTuple):
    """A program as scipy takes it."""

    cost: Any
    lower: Any
    upper: Any
    integer: Any
    rows: Any
    at_least: Any
    at_most: Any


def _solved(given: _Matrices, gap: float) -> Any:
    from scipy.optimize import Bounds, LinearConstraint, milp

    with _quiet():
        return milp(
            given.cost,
            integrality=given.integer,
            bounds=Bounds(given.lower, given.upper),
            constraints=LinearConstraint(given.rows, given.at_least, given.at_most),
            options={"mip_rel_gap": gap, "node_limit": NODES},
        )


def _relaxed(given: _Matrices) -> Any:
    """The program with fractions allowed, and its reduced costs, which scipy's other solver does not tell."""
    import numpy as np
    from scipy.optimize import linprog
    from scipy.sparse import vstack

    equal = given.at_least == given.at_most
    above, below = np.isfinite(given.at_least) & ~equal, np.isfinite(given.at_most) & ~equal
    with _quiet():
        return linprog(
            given.cost,
            A_ub=vstack([given.rows[below], -given.rows[above]]),
            b_ub=np.concatenate([given.at_most[below], -given.at_least[above]]),
            A_eq=given.rows[equal],
            b_eq=given.at_least[equal],
            bounds=np.array([given.lower, given.upper]).T,
            method="highs",
        )

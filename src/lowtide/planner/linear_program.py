"""A mixed-integer linear program, built row by row and solved by HiGHS."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = ["GAP", "LinearProgram", "load_solver"]

GAP = 5e-4
"""The gap at which HiGHS stops."""
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
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array  # type: ignore[import-untyped]

        numbers = [
            (row, variable, value) for row, (terms, _, _) in enumerate(self.rows) for variable, value in terms.items()
        ]
        places = ([one[0] for one in numbers], [one[1] for one in numbers])
        matrix = csr_array(([one[2] for one in numbers], places), shape=(len(self.rows), len(self.lower)))
        cost = np.zeros(len(self.lower))
        for variable, value in self.cost.items():
            cost[variable] = value
        rows = LinearConstraint(
            matrix, np.array([row[1] for row in self.rows]), np.array([row[2] for row in self.rows])
        )
        with _quiet():
            result = milp(
                cost,
                integrality=np.array(self.integer),
                bounds=Bounds(np.array(self.lower), np.array(self.upper)),
                constraints=rows,
                options={"mip_rel_gap": gap, "node_limit": NODES},
            )
        if result.x is None:
            return None
        dual = result.mip_dual_bound
        self.bound = float(result.fun if dual is None else dual)
        return [float(value) for value in result.x]

from __future__ import annotations

import os

import pytest

from lowtide.planner.linear_program import LinearProgram


def test_what_the_solver_prints_is_on_neither_stream(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import scipy.optimize  # type: ignore[import-untyped]

    solve = scipy.optimize.milp

    def noisy(*args: object, **kwargs: object) -> object:
        os.write(1, b"HiGHS has something to say\n")
        return solve(*args, **kwargs)

    monkeypatch.setattr(scipy.optimize, "milp", noisy)
    program = LinearProgram()
    program.row({program.variable(0, 10, integer=True, cost=1.0): 1.0}, 3, 10)
    assert program.solve() == pytest.approx([3.0])
    os.write(1, b"after\n")
    assert capfd.readouterr() == ("after\n", "")

"""Whatever a run does in one process, losses and gradients are bitwise those of the same run without lowtide."""

from __future__ import annotations

from typing import Any

import pytest

import tide
from numerics.policies import every_policy, idle
from numerics.situations import SITUATIONS, run

EXPECTED: dict[tuple[str, str], Any] = {}
"""What each situation gives on each device without lowtide, and the bytes that it leaves there."""


CASES = [
    pytest.param(
        row,
        device,
        id=f"{row} on {device}",
        # One process has them all, and what they are compared with.
        marks=[pytest.mark.xdist_group(row), *([] if fast else [pytest.mark.slow])],
    )
    for row in SITUATIONS
    for device, fast in (("tide", True), ("cpu", row == "one process"))
]


@pytest.mark.composes
@every_policy
@pytest.mark.parametrize(("row", "device"), CASES)
def test_is_exact(row: str, device: str, column: str) -> None:
    situation, prepare = SITUATIONS[row]
    tide.reset()
    if (row, device) not in EXPECTED:
        EXPECTED[row, device] = run(situation, None, device, prepare=prepare)
    found, handle, held = run(situation, column, device, prepare=prepare)
    assert found == EXPECTED[row, device][0]
    assert not idle(column, handle)
    assert held == EXPECTED[row, device][2]
    assert not tide.races()

"""Whatever a run does in one process, losses and gradients are bitwise those of the same run without lowtide."""

from __future__ import annotations

from typing import Any

import pytest

import tide
from numerics.policies import every_policy, idle
from numerics.situations import SITUATIONS, run

EXPECTED: dict[tuple[str, str], Any] = {}


@every_policy
@pytest.mark.parametrize("device", ["cpu", "tide"])
@pytest.mark.parametrize("row", SITUATIONS)
def test_is_exact(row: str, device: str, column: str) -> None:
    situation, prepare = SITUATIONS[row]
    tide.reset()
    if (row, device) not in EXPECTED:
        EXPECTED[row, device] = run(situation, None, device, prepare=prepare)[0]
    before = run(situation, None, device, prepare=prepare)[2] if device == "tide" else 0
    found, handle, held = run(situation, column, device, prepare=prepare)
    assert found == EXPECTED[row, device]
    assert not idle(column, handle)
    assert held == before  # nothing but what the run itself leaves
    assert not tide.races()

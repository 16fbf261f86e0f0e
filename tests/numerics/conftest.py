"""What programs give without lowtide, kept for all tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.ranks import Ranks


@pytest.fixture(scope="session")
def expected(ranks: Ranks) -> Callable[..., list[Any]]:
    """What a program gives without lowtide, run once."""
    known: dict[Any, list[Any]] = {}

    def run(program: Callable[..., Any], device: str) -> list[Any]:
        key = (program.__name__, device)
        if key not in known:
            known[key] = ranks.run(program, None, device)
        return known[key]

    return run

"""The processes, kept for all tests of the models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from models.ranks import Ranks


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four processes."""
    ranks = Ranks()
    yield ranks
    ranks.stop()

"""Fixtures for pytest. In a `conftest.py`:

    pytest_plugins = ["tide.testing"]

Every test then starts on a fresh device and fails if it leaves a race behind. A test that wants to
look at the reports itself takes the fixture `expect_races`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

import tide


@pytest.fixture(autouse=True)
def fresh_tide(request: pytest.FixtureRequest) -> Iterator[None]:
    """A device as after import; any race fails the test."""
    if torch.accelerator.memory_allocated():
        gc.collect()  # tensors in reference cycles of the last test are not this one's
    tide.reset()
    yield
    if "expect_races" not in request.fixturenames:
        tide.check_races()
    tide.reset()


@pytest.fixture
def expect_races() -> Callable[[], list[tide.Race]]:
    """The reports so far; with this fixture they do not fail the test."""
    return tide.races

"""Settings of all tests."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from lowtide._torch_private import current_dispatch_mode, pop_saved_tensors_hooks, top_saved_tensors_hooks
from ranks import Ranks

# The tests run in two processes on two cores. With two threads in each these wait for each other, and sums may be
# split otherwise than in the run that they are compared with.
torch.set_num_threads(1)

# Two noisy cores: time says nothing about an example, and a failure must come again.
settings.register_profile("lowtide", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lowtide")


@pytest.fixture(autouse=True)
def _nothing_left_on() -> Iterator[None]:
    """What a test leaves on, a mode or hooks, is taken off, so that the next ones do not run in it, and is named."""
    yield
    while (mode := current_dispatch_mode()) is not None:
        warnings.warn(f"the test left {mode} on", stacklevel=1)
        mode.__exit__(None, None, None)
    while (hooks := top_saved_tensors_hooks(False)) is not None:
        warnings.warn(f"the test left {hooks} on", stacklevel=1)
        pop_saved_tensors_hooks()


@pytest.fixture(scope="session")
def one() -> Iterator[Ranks]:
    """One process as a group, kept for all tests."""
    alone = Ranks(1)
    yield alone
    alone.stop()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Two processes, kept for all tests."""
    both = Ranks(2)
    yield both
    both.stop()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four processes, kept for all tests."""
    all_four = Ranks(4)
    yield all_four
    all_four.stop()

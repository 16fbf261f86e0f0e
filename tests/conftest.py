"""Settings of all tests."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from lowtide._torch_private.modes import function_modes
from support.garbage import collect_garbage
from support.left_on import take_off
from support.ranks import Ranks

# What a command keeps for the next one goes here, not into the home of whoever runs the tests.
os.environ["XDG_CACHE_HOME"] = os.path.join(tempfile.gettempdir(), f"lowtide-tests-{os.getuid()}")

# The tests run in two processes on two cores. With two threads in each, or in what they start, these wait for each
# other, and sums may be split otherwise than in the run that they are compared with.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

# Two noisy cores: time says nothing about an example, and a failure must come again.
settings.register_profile("lowtide", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("lowtide")


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in its own
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on ranks run one after another: on two cores, two of them at once take more than twice as long each."""
    for item in items:
        if {"ranks", "four_ranks"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.fixture(scope="module", autouse=True)
def _collections_are_short() -> None:
    """Collections look only at what the module's tests make: all that torch's compiler has takes a second each time.

    What an earlier test still has on a device may yet go, so it is not set aside.
    """
    collect_garbage()
    if on_a_device():
        gc.unfreeze()
        collect_garbage()
    if not on_a_device():
        gc.freeze()


def on_a_device() -> int:
    """Bytes of tensors there."""
    return torch.accelerator.memory_allocated() if torch.accelerator.is_available() else 0


@pytest.fixture(autouse=True)
def _nothing_left_on() -> Iterator[None]:
    """A test that leaves a mode, hooks or a patched function on fails; they are taken off, for the sake of the next."""
    modes = function_modes()
    yield
    left = take_off(modes)
    assert not left, f"the test left on: {', '.join(left)}"


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

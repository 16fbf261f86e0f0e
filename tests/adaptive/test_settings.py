"""The MindSpeed guide's rules for its flags and its environment."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.adaptive.settings import AdaptSettings, profiling_warnings, read_settings

MEMORY = 64 * 2**30


def read(**given: Any) -> tuple[AdaptSettings, tuple[str, ...]]:
    """The settings of a run that adapts itself, and what was warned of."""
    settings, warnings = read_settings(**{"environment": {}, "device_memory": MEMORY, "steps": 1000, **given})
    assert settings is not None
    return settings, warnings


@pytest.mark.parametrize("given", [{}, {"device_swap": False}, {"device_size": 0}, {"device_size": -1}])
def test_nothing_adapts_unless_it_is_asked_for(given: dict[str, Any]) -> None:
    assert read_settings(**given, profiling_step=20, environment={"SWAP_SIZE_MULTIPLE": "x"}) == (None, ())


@pytest.mark.parametrize(
    ("given", "rescue"),
    [
        ({"device_swap": True}, True),
        ({"device_swap": True, "device_size": 1000}, True),
        ({"device_size": 1000}, False),
        ({"budget": "auto"}, True),
        ({"budget": 2**30}, True),
        ({"budget": 2**30, "device_swap": False}, False),
    ],
)
def test_a_device_size_alone_means_no_rescue(given: dict[str, Any], rescue: bool) -> None:
    settings, warnings = read(**given)
    assert settings.rescue is rescue
    assert warnings == ()


def test_a_device_size_is_in_megabytes_of_two_to_the_twentieth() -> None:
    assert read(device_size=61440)[0].budget == 60 * 2**30


def test_a_device_size_above_the_devices_memory_is_the_devices_memory() -> None:
    settings, warnings = read(device_size=MEMORY // 2**20 + 1)
    assert settings.budget == MEMORY
    assert "more than the device's memory: 64 GiB is used" in warnings[0]


@pytest.mark.parametrize("size", [0, -5])
def test_a_device_size_that_is_not_above_zero_leaves_the_budget_to_the_device(size: int) -> None:
    settings, warnings = read(device_swap=True, device_size=size)
    assert settings == AdaptSettings()
    assert warnings == (f"device size {size} MB is not above 0: the plan may fill the device's memory",)


@pytest.mark.parametrize("step", [0, -3])
def test_a_profiling_step_that_is_not_above_zero_warns_and_is_ten(step: int) -> None:
    settings, warnings = read(device_swap=True, profiling_step=step)
    assert settings.profiling_steps == 10
    assert warnings == (f"profiling step {step} is not above 0: 10 steps are measured",)


@pytest.mark.parametrize(("step", "steps", "count"), [(4, 1000, 1), (5, 50, 0), (6, 50, 1), (4, 30, 2), (10, 100, 0)])
def test_few_steps_and_more_than_a_tenth_of_all_are_warned_of_and_used(step: int, steps: int, count: int) -> None:
    settings, warnings = read(device_swap=True, profiling_step=step, steps=steps)
    assert settings.profiling_steps == step
    assert len(warnings) == count
    assert warnings == profiling_warnings(step, steps)


def test_steps_that_are_not_known_yet_are_not_judged() -> None:
    assert read(device_swap=True, profiling_step=3, steps=None)[1] == ()


@pytest.mark.parametrize(
    ("name", "text", "value", "warned"),
    [
        ("MIN_SWAP_TENSOR_SIZE", "4096", 4096, False),
        ("MIN_SWAP_TENSOR_SIZE", "1023", 1024, True),
        ("MIN_SWAP_TENSOR_SIZE", "4kB", 1024, True),
        ("MIN_SWAP_TENSOR_SIZE", "", 1024, False),
        ("SWAP_SIZE_MULTIPLE", "2", 2.0, False),
        ("SWAP_SIZE_MULTIPLE", "1.5", 1.5, False),
        ("SWAP_SIZE_MULTIPLE", "0.5", 1.0, True),
        ("SWAP_SIZE_MULTIPLE", "inf", 1.0, True),
        ("SWAP_SIZE_MULTIPLE", "nan", 1.0, True),
        ("SWAP_SIZE_MULTIPLE", "many", 1.0, True),
    ],
)
def test_a_variable_that_cannot_be_used_warns_and_is_its_default(
    name: str, text: str, value: float, warned: bool
) -> None:
    settings, warnings = read(device_swap=True, environment={name: text})
    assert (settings.smallest if name == "MIN_SWAP_TENSOR_SIZE" else settings.multiple) == value
    assert [name in warning for warning in warnings] == ([True] if warned else [])


@given(
    device_swap=st.none() | st.booleans(),
    device_size=st.none() | st.integers(-(10**9), 10**9),
    budget=st.none() | st.just("auto") | st.integers(1, 2**50),
    profiling_step=st.none() | st.integers(-(10**6), 10**6),
    smallest=st.text(max_size=8),
    multiple=st.text(max_size=8),
)
def test_settings_can_be_used_whatever_is_given(smallest: str, multiple: str, **given: Any) -> None:
    environment = {"MIN_SWAP_TENSOR_SIZE": smallest, "SWAP_SIZE_MULTIPLE": multiple}
    settings, _ = read_settings(**given, environment=environment, device_memory=MEMORY, steps=100)
    if settings is not None:
        assert settings.profiling_steps > 0
        assert settings.budget is None or 0 < settings.budget <= MEMORY
        assert settings.smallest >= 1024
        assert settings.multiple >= 1

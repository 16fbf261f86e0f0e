"""The loss scale as a value that each step turns into the next."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.train.loss_scale import Scale, scale_of
from support.schema_reading import read


def of(scale_sense: object) -> Scale:
    settings, problems = read({"runner_wrapper": {"scale_sense": scale_sense}})
    assert problems.errors == []
    return scale_of(settings.runner_wrapper.scale_sense)


def test_settings_become_scales() -> None:
    assert of(None) == Scale(value=1.0)
    assert of(1024) == Scale(value=1024.0)
    assert of({"type": "DynamicLossScaleUpdateCell"}) == Scale(value=65536.0, factor=2.0, window=1000)
    fixed = of({"type": "FixedLossScaleUpdateCell", "loss_scale_value": 8})
    assert fixed.after(overflow=True) == fixed
    assert fixed.value == 8.0


@given(st.lists(st.booleans(), max_size=300), st.integers(1, 5), st.sampled_from([2.0, 4.0, 1.5]))
def test_a_scale_stays_a_positive_number(overflows: list[bool], window: int, factor: float) -> None:
    scale = Scale(value=2.0**100, window=window, factor=factor)
    for overflow in overflows:
        before, scale = scale, scale.after(overflow=overflow)
        assert 1.0 <= scale.value <= 2.0**120
        assert math.isfinite(scale.value)
        assert scale.value <= before.value if overflow else scale.value >= before.value


@given(st.lists(st.booleans(), max_size=40), st.integers(0, 40))
def test_a_scale_goes_on_after_a_checkpoint_as_if_nothing_had_been(overflows: list[bool], stop: int) -> None:
    straight = interrupted = Scale(value=64.0, window=3)
    for number, overflow in enumerate(overflows):
        if number == stop:
            interrupted = Scale(value=64.0, window=3).loaded(interrupted.state_dict())
        straight, interrupted = straight.after(overflow=overflow), interrupted.after(overflow=overflow)
    assert straight == interrupted


def test_a_fixed_scale_is_the_files_not_the_checkpoints() -> None:
    assert Scale(value=8.0).loaded(Scale(value=2.0).state_dict()).value == 8.0


@pytest.mark.parametrize("small", [0.5, 1.0])
def test_a_scale_at_or_below_one_is_not_lowered_further(small: float) -> None:
    assert Scale(value=small, window=2).after(overflow=True).value == small

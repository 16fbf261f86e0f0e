"""Every schedule against its formula, and its ends."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.config.schema.optimizer import GroupedLrSchedule, LrSchedule
from lowtide.errors import ConfigError
from lowtide.train.learning_rate import Schedule, groups_of, schedule_of
from support.schema_reading import read


def made(kind: str, total: int = 100, epoch: int = 10, default: float | None = None, **settings: Any) -> Schedule:
    section, problems = read({"lr_schedule": {"type": kind, "learning_rate": 1.0, **settings}})
    assert problems.errors == []
    return schedule_of(section.lr_schedule, total_steps=total, steps_per_epoch=epoch, default_rate=default)


WARM = {"warmup_steps": 10, "warmup_lr_init": 0.2}
WARMED = [
    ("ConstantWarmUpLR", {}),
    ("LinearWithWarmUpLR", {}),
    ("CosineWithWarmUpLR", {}),
    ("CosineWithRestartsAndWarmUpLR", {}),
    ("PolynomialWithWarmUpLR", {}),
    ("WarmUpStableDecayLR", {"decay_start_ratio": 0.5}),
    ("ConstantWithCoolDownLR", {}),
]


@pytest.mark.parametrize(("kind", "settings"), WARMED)
def test_the_warm_up_is_a_straight_line_to_the_rate(kind: str, settings: dict[str, Any]) -> None:
    schedule = made(kind, **WARM, **settings)
    assert [schedule(step) for step in range(11)] == pytest.approx([0.2 + 0.08 * step for step in range(11)])


@pytest.mark.parametrize(("kind", "settings"), WARMED)
def test_without_warm_up_the_first_step_has_the_full_rate(kind: str, settings: dict[str, Any]) -> None:
    assert made(kind, **settings)(0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"warmup_ratio": 0.25}, 25),
        ({"warmup_steps": 7, "warmup_ratio": 0.25}, 25),
        ({"warmup_steps": 7}, 7),
        ({"warmup_epochs": 2, "warmup_ratio": 0.25}, 25),
        ({"warmup_ratio": 0.25, "total_steps": 40}, 10),
        ({"warmup_ratio": 0.25, "total_steps": -1}, 25),
    ],
)
def test_how_long_the_warm_up_is(settings: dict[str, Any], steps: int) -> None:
    schedule = made("ConstantWarmUpLR", **settings)
    assert schedule(steps - 1) < 1.0
    assert schedule(steps) == 1.0


def test_epochs_of_warm_up_are_counted_in_steps() -> None:
    section = LrSchedule(type="ConstantWarmUpLR", learning_rate=1.0, warmup_epochs=2)
    schedule = schedule_of(section, total_steps=100, steps_per_epoch=10, default_rate=None)
    assert schedule(19) == pytest.approx(0.95)
    assert schedule(20) == 1.0


# Rates worked out by hand from the formulas: (type, settings, {step: rate}).
POINTS = [
    ("ConstantWarmUpLR", WARM, {10: 1.0, 99: 1.0, 1000: 1.0}),
    ("LinearWithWarmUpLR", WARM, {10: 1.0, 55: 0.5, 100: 0.0, 200: 0.0}),
    ("CosineWithWarmUpLR", WARM | {"lr_end": 0.1}, {10: 1.0, 55: 0.55, 40: 0.1 + 0.9 * 0.75, 100: 0.1, 300: 0.1}),
    (
        "CosineWithWarmUpLR",
        {"decay_steps": 50, "lr_end": 0.1},
        {49: 0.1 + 0.45 * (1 + math.cos(0.49 * math.pi)), 50: 0.1},
    ),
    ("CosineWithWarmUpLR", {"decay_ratio": 0.3}, {29: 0.5 * (1 + math.cos(0.29 * math.pi)), 30: 0.0}),
    ("CosineWithWarmUpLR", {"num_cycles": 1.0}, {25: 0.5, 50: 0.0, 75: 0.5}),
    ("CosineWithRestartsAndWarmUpLR", {"num_cycles": 2.0, "lr_end": 0.2}, {25: 0.6, 50: 1.0, 75: 0.6, 100: 0.2}),
    (
        "PolynomialWithWarmUpLR",
        WARM | {"power": 2.0, "lr_end": 0.1},
        {10: 1.0, 55: 0.1 + 0.9 * 0.25, 100: 0.1, 150: 0.1},
    ),
    ("PolynomialWithWarmUpLR", {"decay_steps": 50, "lr_end": 0.1}, {25: 0.55, 50: 0.1, 99: 0.1}),
    ("PolynomialWithWarmUpLR", {}, {100: 1e-7}),
    (
        "WarmUpStableDecayLR",
        WARM | {"decay_start_ratio": 0.8, "lr_end": 0.2},
        {10: 1.0, 80: 1.0, 90: 0.6, 100: 0.2, 120: 0.2},
    ),
    ("WarmUpStableDecayLR", {"decay_start_steps": 60}, {60: 1.0, 80: 1.0 - (1.0 - 1e-7) / 2, 100: 1e-7}),
    ("WarmUpStableDecayLR", {"decay_start_steps": 60, "decay_start_ratio": 0.8}, {80: 1.0, 90: 0.5 + 5e-8}),
    ("WarmUpStableDecayLR", {"decay_steps": 20, "lr_end": 0.0}, {80: 1.0, 90: 0.5}),
    (
        "ConstantWithCoolDownLR",
        WARM | {"keep_steps": 20, "decay_steps": 40, "lr_end1": 0.2, "final_steps": 10, "lr_end2": 0.05},
        {10: 1.0, 30: 1.0, 50: 0.6, 70: 0.2, 79: 0.2, 80: 0.05, 99: 0.05},
    ),
    (
        "ConstantWithCoolDownLR",
        {"keep_steps": 20, "decay_ratio": 0.4, "lr_end1": 0.2},
        {19: 1.0, 40: 0.6, 60: 0.2, 99: 0.2},
    ),
    ("CosineAnnealingLR", {"t_max": 50, "eta_min": 0.2}, {0: 1.0, 25: 0.6, 50: 0.2, 75: 0.6, 100: 1.0}),
    ("CosineAnnealingLR", {"t_max": 50, "base_lr": 2.0}, {0: 2.0, 25: 1.0}),
    ("CosineAnnealingWarmRestarts", {"t_0": 20, "eta_min": 0.2}, {0: 1.0, 10: 0.6, 20: 1.0, 30: 0.6, 210: 0.6}),
    (
        "CosineAnnealingWarmRestartsLR",
        {"t_0": 10, "t_mult": 2},
        {0: 1.0, 5: 0.5, 10: 1.0, 20: 0.5, 30: 1.0, 50: 0.5, 70: 1.0},
    ),
]


@pytest.mark.parametrize(("kind", "settings", "points"), POINTS)
def test_the_curve_goes_through_its_points(kind: str, settings: dict[str, Any], points: dict[int, float]) -> None:
    schedule = made(kind, **settings)
    assert {step: schedule(step) for step in points} == pytest.approx(points, abs=1e-12)


@given(st.sampled_from(POINTS), st.integers(0, 500), st.integers(1, 400))
def test_no_rate_leaves_its_bounds(point: tuple[str, dict[str, Any], Any], step: int, total: int) -> None:
    kind, settings, _ = point
    assert 0.0 <= made(kind, total=total, **settings)(step) <= 2.0


def test_the_optimizers_rate_is_taken_where_the_schedule_has_none() -> None:
    schedule = schedule_of(LrSchedule(), total_steps=10, steps_per_epoch=10, default_rate=0.3)
    assert schedule(5) == 0.3
    with pytest.raises(ConfigError, match="has no learning rate"):
        schedule_of(LrSchedule(), total_steps=10, steps_per_epoch=10, default_rate=None)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("WarmUpStableDecayLR", {}, "needs to know where the decay begins"),
        ("CosineAnnealingWarmRestarts", {}, "needs `t_0`"),
        ("PolynomialWithWarmUpLR", {"lr_end": 1.0}, "not below the learning rate"),
    ],
)
def test_what_a_schedule_lacks_is_named(kind: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(kind, **settings)


NAMES = ["embedding.weight", "layers.0.attention.wq.weight", "layers.0.norm.weight", "head.weight"]


def groups(*grouped: LrSchedule, default: LrSchedule | None = None) -> dict[tuple[str, ...], float]:
    settings = GroupedLrSchedule(default=default, grouped=list(grouped))
    found = groups_of(
        NAMES, LrSchedule(learning_rate=1.0), settings, total_steps=10, steps_per_epoch=10, default_rate=None
    )
    return {group.parameters: group.schedule(5) for group in found}


def test_parameters_are_grouped_by_the_first_pattern_found_in_their_names() -> None:
    embedding = LrSchedule(learning_rate=0.1, params=["embedding", "head"])
    norms = LrSchedule(learning_rate=0.2, params=[r"norm\.weight$", "embed.*"])
    assert groups(embedding, norms) == {
        (NAMES[0], NAMES[3]): 0.1,
        (NAMES[2],): 0.2,
        (NAMES[1],): 1.0,
    }
    assert groups() == {tuple(NAMES): 1.0}
    assert groups(LrSchedule(learning_rate=0.1, params=["."]), default=LrSchedule(learning_rate=5.0)) == {
        tuple(NAMES): 0.1
    }
    assert groups(embedding, default=LrSchedule(learning_rate=5.0))[(NAMES[1], NAMES[2])] == 5.0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (["router"], "no parameter has 'router' in its name"),
        (["("], "no regular expression"),
        (None, "has no `params`"),
    ],
)
def test_a_group_without_parameters_is_an_error(params: list[str] | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        groups(LrSchedule(learning_rate=0.1, params=params))

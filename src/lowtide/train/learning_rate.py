"""The learning rate of each step: the schedules of the MindSpore Transformers guide as functions of the step.

Steps count from 0: the rate of the first step is ``schedule(0)``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from lowtide.errors import ConfigError

if TYPE_CHECKING:
    from lowtide.config.schema.optimizer import GroupedLrSchedule, LrSchedule

__all__ = ["Group", "Schedule", "groups_of", "schedule_of"]

Schedule: TypeAlias = Callable[[int], float]
"""The learning rate of a step, from 0."""

SMALL_END = 1e-7
"""Where the polynomial and the stable schedule end by default, as in the reference."""


@dataclass(frozen=True)
class Group:
    """Parameters with the same learning rate."""

    schedule: Schedule
    """The rate of a step."""
    parameters: tuple[str, ...]
    """Their names."""


def schedule_of(
    settings: LrSchedule, *, total_steps: int, steps_per_epoch: int, default_rate: float | None
) -> Schedule:
    """The schedule that a file asks for; ``default_rate`` is the optimizer's, for a schedule without one."""
    rate = settings.learning_rate if settings.learning_rate is not None else settings.base_lr
    rate = default_rate if rate is None else rate
    if rate is None:
        raise ConfigError(
            f"the schedule {settings.type} has no learning rate; set `lr_schedule.learning_rate`, such as 1.e-4"
        )
    if settings.total_steps not in (None, -1):
        total_steps = settings.total_steps or 0
    return _CURVES[settings.type](settings, _Span(rate, total_steps, _warmup(settings, total_steps, steps_per_epoch)))


def groups_of(
    names: Iterable[str],
    settings: LrSchedule,
    grouped: GroupedLrSchedule,
    *,
    total_steps: int,
    steps_per_epoch: int,
    default_rate: float | None,
) -> list[Group]:
    """The parameters by schedule: the first group one of whose patterns is found in a name has it.

    ``names`` are those of the whole model, also on a pipeline stage that holds a part of it: a pattern that is found in
    none of them is an error. Groups without a parameter are left out.
    """

    def made(one: LrSchedule) -> Schedule:
        return schedule_of(one, total_steps=total_steps, steps_per_epoch=steps_per_epoch, default_rate=default_rate)

    groups = grouped.grouped or []
    members: list[list[str]] = [[] for _ in range(len(groups) + 1)]
    patterns = [[_compiled(text) for text in group.params or []] for group in groups]
    for place, group in enumerate(patterns):
        if not group:
            raise ConfigError(f"`grouped_lr_schedule.grouped[{place}]` has no `params`; list the parameters it is for")
    everything = list(names)
    for group in patterns:
        for pattern in group:
            if not any(pattern.search(name) for name in everything):
                some = ", ".join(everything[:4])
                raise ConfigError(
                    f"`grouped_lr_schedule`: no parameter has {pattern.pattern!r} in its name; names are such as {some}"
                )
    for name in everything:
        found = (place for place, group in enumerate(patterns) if any(one.search(name) for one in group))
        members[next(found, len(groups))].append(name)
    schedules = [*groups, grouped.default or settings]
    return [Group(made(one), tuple(inside)) for one, inside in zip(schedules, members, strict=True) if inside]


def _compiled(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(f"`grouped_lr_schedule`: {text!r} is no regular expression ({error})") from None


@dataclass(frozen=True)
class _Span:
    """What every schedule knows."""

    rate: float
    total: int
    warmup: int


def _warmup(settings: LrSchedule, total: int, steps_per_epoch: int) -> int:
    """Steps of the warm-up: a share of all steps goes before epochs, and epochs before steps."""
    if settings.warmup_ratio is not None:
        return int(total * settings.warmup_ratio)
    if settings.warmup_epochs is not None:
        return settings.warmup_epochs * steps_per_epoch
    return settings.warmup_steps or 0


def _warmed(settings: LrSchedule, span: _Span, curve: Schedule) -> Schedule:
    """A curve after a rise in a straight line."""

    def rate(step: int) -> float:
        if step < span.warmup:
            return settings.warmup_lr_init + (span.rate - settings.warmup_lr_init) * step / span.warmup
        return curve(step)

    return rate


def _constant(settings: LrSchedule, span: _Span) -> Schedule:
    return _warmed(settings, span, lambda step: span.rate)


def _linear(settings: LrSchedule, span: _Span) -> Schedule:
    length = max(1, span.total - span.warmup)
    return _warmed(settings, span, lambda step: span.rate * max(0.0, (span.total - step) / length))


def _cosine(settings: LrSchedule, span: _Span) -> Schedule:
    length = max(1, span.total - span.warmup)
    cycles = 0.5 if settings.num_cycles is None else settings.num_cycles

    def curve(step: int) -> float:
        return _wave(settings.lr_end or 0.0, span.rate, 2 * cycles * (step - span.warmup) / length)

    return _ending(settings, span, _warmed(settings, span, curve))


def _cosine_with_restarts(settings: LrSchedule, span: _Span) -> Schedule:
    length = max(1, span.total - span.warmup)
    cycles = 1.0 if settings.num_cycles is None else settings.num_cycles

    def curve(step: int) -> float:
        progress = (step - span.warmup) / length
        return _wave(settings.lr_end or 0.0, span.rate, cycles * progress % 1 if progress < 1 else 1.0)

    return _ending(settings, span, _warmed(settings, span, curve))


def _ending(settings: LrSchedule, span: _Span, schedule: Schedule) -> Schedule:
    """The last rate from the end of the decay on, counted from the first step and before any warm-up."""
    last = max(1, _decay(settings, span, span.total))
    return lambda step: (settings.lr_end or 0.0) if step >= last else schedule(step)


def _polynomial(settings: LrSchedule, span: _Span) -> Schedule:
    end = _lower_end(settings, span)
    length = max(1, _decay(settings, span, span.total - span.warmup))

    def curve(step: int) -> float:
        left = max(0.0, 1 - (step - span.warmup) / length)
        return end + (span.rate - end) * math.pow(left, settings.power)

    return _warmed(settings, span, curve)


def _stable(settings: LrSchedule, span: _Span) -> Schedule:
    end = _lower_end(settings, span)
    if settings.decay_start_ratio is not None:
        start = int(span.total * settings.decay_start_ratio)
    elif settings.decay_start_steps is not None:
        start = settings.decay_start_steps
    elif settings.decay_steps is not None or settings.decay_ratio is not None:
        start = span.total - _decay(settings, span, 0)
    else:
        raise ConfigError(
            "WarmUpStableDecayLR needs to know where the decay begins; set `decay_start_ratio: 0.9` or "
            "`decay_start_steps`"
        )
    length = max(1, span.total - start)
    return _warmed(
        settings, span, lambda step: span.rate - (span.rate - end) * min(1.0, max(0.0, (step - start) / length))
    )


def _cool_down(settings: LrSchedule, span: _Span) -> Schedule:
    cycles = 0.5 if settings.num_cycles is None else settings.num_cycles
    start = span.warmup + settings.keep_steps
    length = max(1, _decay(settings, span, span.total - start))
    last = settings.lr_end1 if settings.lr_end2 is None else settings.lr_end2

    def curve(step: int) -> float:
        if step < start:
            return span.rate
        if step < start + length:
            return _wave(settings.lr_end1, span.rate, 2 * cycles * (step - start) / length)
        return settings.lr_end1 if step < start + length + settings.final_steps else last

    return _warmed(settings, span, curve)


def _annealing(settings: LrSchedule, span: _Span) -> Schedule:
    length = settings.t_max or max(1, span.total)
    top = _top(settings, span)
    return lambda step: _wave(settings.eta_min, top, step / length)


def _annealing_with_restarts(settings: LrSchedule, span: _Span) -> Schedule:
    first, growth = settings.t_0, settings.t_mult
    if first is None:
        raise ConfigError(
            "CosineAnnealingWarmRestarts needs `t_0`, the steps until the first restart; write `t_0: 1000`"
        )
    top = _top(settings, span)

    def rate(step: int) -> float:
        length = first
        if growth == 1:
            step %= length
        while step >= length:  # a logarithm would miss restarts by rounding; lengths grow, so this is short
            step, length = step - length, length * growth
        return _wave(settings.eta_min, top, step / length)

    return rate


def _top(settings: LrSchedule, span: _Span) -> float:
    return span.rate if settings.base_lr is None else settings.base_lr


def _wave(low: float, high: float, half_turns: float) -> float:
    return low + (high - low) * max(0.0, 0.5 * (1 + math.cos(math.pi * half_turns)))


def _decay(settings: LrSchedule, span: _Span, default: int) -> int:
    if settings.decay_ratio is not None:
        return int(span.total * settings.decay_ratio)
    return default if settings.decay_steps is None else settings.decay_steps


def _lower_end(settings: LrSchedule, span: _Span) -> float:
    end = SMALL_END if settings.lr_end is None else settings.lr_end
    if end >= span.rate:
        raise ConfigError(
            f"{settings.type} goes down to `lr_end`, which is {end} and not below the learning rate of {span.rate}; "
            "make it smaller"
        )
    return end


_CURVES: dict[str, Callable[[LrSchedule, _Span], Schedule]] = {
    "ConstantWarmUpLR": _constant,
    "LinearWithWarmUpLR": _linear,
    "CosineWithWarmUpLR": _cosine,
    "CosineWithRestartsAndWarmUpLR": _cosine_with_restarts,
    "PolynomialWithWarmUpLR": _polynomial,
    "WarmUpStableDecayLR": _stable,
    "ConstantWithCoolDownLR": _cool_down,
    "CosineAnnealingLR": _annealing,
    "CosineAnnealingWarmRestarts": _annealing_with_restarts,
    "CosineAnnealingWarmRestartsLR": _annealing_with_restarts,
}

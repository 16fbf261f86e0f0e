"""The settings of the adaptive mode, and the MindSpeed guide's rules for reading them. No torch here."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lowtide.units import format_bytes

__all__ = ["PROFILING_STEPS", "AdaptSettings", "ReadSettings", "profiling_warnings", "read_settings"]

PROFILING_STEPS = 10
"""Steps before the plan is made."""
FEW_STEPS = 5
"""Profiling fewer steps than this gives a warning."""
LARGEST_SHARE = 10
"""Profiling more than one step in so many gives a warning."""
SMALLEST_TENSOR = 1024
"""Bytes; the rescue never offloads smaller tensors, whatever the environment says."""
MEGABYTE = 2**20
"""The guide's MB: torch_npu and Megatron count memory in these."""


@dataclass(frozen=True, kw_only=True)
class AdaptSettings:
    """How a run adapts itself to its memory."""

    profiling_steps: int | None = PROFILING_STEPS
    """Steps before the plan, under a safe Policy or profiled; None: as few as it takes."""
    budget: int | None = None
    """Bytes of the device that the plan may fill; None: the device's memory less a measured margin. It bounds the plan,
    not the device: if nothing fits, everything is recomputed."""
    rescue: bool = True
    """Whether on OOM tensors are offloaded and operators and steps are retried."""
    watch: Literal["suspicion", "always"] = "suspicion"
    """In which steps every operator is watched for OOM: those that give a reason, or all."""
    swap: bool = True
    """Whether the plan may swap."""
    smallest: int = SMALLEST_TENSOR
    """Bytes; the rescue never offloads smaller tensors."""
    multiple: float = 1.0
    """How many times the missing bytes the rescue offloads."""
    error: float = 0.05
    """How far a step's memory may be above its plan, as a share, before the run is re-planned."""
    replan_every: int = 20
    """Steps between two plans. The first re-plans may come sooner: a wrong plan is replaced after two steps, the next
    after twice as many, and so on up to this."""
    verbose: bool = True
    """Whether decisions are printed."""


class ReadSettings(NamedTuple):
    """The settings that were read, with warnings."""

    settings: AdaptSettings | None
    """None where the adaptive mode is off."""
    warnings: tuple[str, ...]
    """Each names a value that cannot be used, and the one that is used instead."""


def read_settings(
    *,
    device_swap: bool | None = None,
    device_size: int | None = None,
    budget: int | Literal["auto"] | None = None,
    profiling_step: int | None = None,
    verbose: bool = True,
    device_memory: int | None = None,
    steps: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> ReadSettings:
    """Read the settings by the guide's rules: a value that cannot be used gives a warning and the default.

    The mode is on with ``device_swap``, and then rescues; with a ``device_size`` (MB) above zero, and then does not,
    unless ``device_swap`` says so too; or with a ``budget`` (bytes, or ``"auto"``), and then rescues unless
    ``device_swap`` is False. ``device_memory`` is the device's, in bytes, None where it is not known: no plan may fill
    more. ``steps`` are all steps of the run, None where they are not known yet; see :func:`profiling_warnings`.

    >>> read_settings(device_size=61440, environment={}).settings.rescue
    False
    >>> read_settings(device_swap=True, profiling_step=0, environment={}).warnings
    ('profiling step 0 is not above 0: 10 steps are measured',)
    """
    sized = device_size is not None and device_size > 0
    if not (device_swap or sized or budget is not None):
        return ReadSettings(None, ())
    warnings: list[str] = []
    measured = _profiling_steps(profiling_step, warnings)
    if steps is not None:
        warnings += profiling_warnings(measured, steps)
    asked = budget if isinstance(budget, int) else device_size * MEGABYTE if sized and device_size is not None else None
    if device_size is not None and device_size <= 0:
        warnings.append(f"device size {device_size} MB is not above 0: the plan may fill the device's memory")
    if asked is not None and device_memory is not None and asked > device_memory:
        name = "budget" if isinstance(budget, int) else "device size"
        warnings.append(
            f"{name} {format_bytes(asked)} is more than the device's memory: {format_bytes(device_memory)} is used"
        )
        asked = device_memory
    rescue = device_swap if device_swap is not None else budget is not None
    smallest, multiple = SMALLEST_TENSOR, 1.0
    if rescue:  # the guide's variables are the rescue's; without it they are ignored
        smallest = int(_at_least(SMALLEST_TENSOR, "MIN_SWAP_TENSOR_SIZE", environment, warnings, whole=True))
        multiple = _at_least(1.0, "SWAP_SIZE_MULTIPLE", environment, warnings)
    return ReadSettings(
        AdaptSettings(
            profiling_steps=measured,
            budget=asked,
            rescue=rescue,
            smallest=smallest,
            multiple=multiple,
            verbose=verbose,
        ),
        tuple(warnings),
    )


def profiling_warnings(profiling_steps: int, steps: int) -> tuple[str, ...]:
    """Warnings about profiling so many steps of a run of ``steps``; they do not change the run.

    >>> profiling_warnings(10, 50)
    ('profiling step 10 is more than a tenth of all 50 steps: the plan serves only the rest',)
    """
    warnings = []
    if profiling_steps < FEW_STEPS:
        warnings.append(f"profiling step {profiling_steps} is below {FEW_STEPS}: what is measured may not be typical")
    if profiling_steps * LARGEST_SHARE > steps:
        warnings.append(
            f"profiling step {profiling_steps} is more than a tenth of all {steps} steps: the plan serves only the rest"
        )
    return tuple(warnings)


def _profiling_steps(asked: int | None, warnings: list[str]) -> int:
    if asked is None:
        return PROFILING_STEPS
    if asked <= 0:
        warnings.append(f"profiling step {asked} is not above 0: {PROFILING_STEPS} steps are measured")
        return PROFILING_STEPS
    return asked


def _at_least(
    least: float, name: str, environment: Mapping[str, str], warnings: list[str], *, whole: bool = False
) -> float:
    """A variable's number, or ``least`` where it is unset, too small or not a number; the last two give a warning."""
    text = environment.get(name, "").strip()
    if not text:
        return least
    try:
        value: float = int(text) if whole else float(text)
    except ValueError:
        value = math.nan
    if least <= value < math.inf:
        return value
    kind = "a whole number" if whole else "a number"
    warnings.append(f"{name} is {text[:40]!r}, expected {kind} from {least:g} on: {least:g} is used")
    return least

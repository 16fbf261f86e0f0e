"""What a person may say about the adaptive mode. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PROFILING_STEPS", "AdaptSettings"]

PROFILING_STEPS = 10
"""Steps that are measured before the plan is made."""


@dataclass(frozen=True, kw_only=True)
class AdaptSettings:
    """How a run adapts itself to its memory."""

    profiling_steps: int = PROFILING_STEPS
    """Steps under a safe Policy, in which the run is measured."""
    budget: int | None = None
    """Bytes of the device that the plan may fill; None: the device's memory less a measured margin. It bounds the plan
    and is no capacity: if nothing fits, everything is recomputed."""
    rescue: bool = True
    """Whether tensors are sent to the host, and operators and steps repeated, where an allocation fails."""
    swap: bool = True
    """Whether the plan may swap."""
    smallest: int = 1024
    """Bytes; smaller tensors are never sent away by the rescue."""
    multiple: float = 1.0
    """How many times the bytes that were missing the rescue sends away."""
    error: float = 0.05
    """How far a step's memory or time may be from what was planned, as a share, before a new plan is made."""
    replan_every: int = 20
    """Steps between two plans, at least."""
    verbose: bool = True
    """Whether what is decided is printed."""

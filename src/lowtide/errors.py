"""The exceptions lowtide raises.

::

    LowtideError
    ├── CheckpointError         a checkpoint cannot be written, or is damaged, or does not fit the run
    ├── ConfigError             a configuration file cannot be used
    ├── DataError               training data cannot be read, or does not fit the model
    ├── LaunchError             the processes of a run cannot be started, or do not find each other
    ├── ModelError              a model cannot be understood: no layers, or no such module
    ├── PlanError               no plan can be made: the budget, the device or the layout is not possible
    │   └── InfeasibleError     nothing fits the budget; the plan that needs least is its `plan`
    ├── PolicyError             a Policy cannot be read, or does not fit its model
    │   ├── PatternError        a pattern is not written as the pattern language asks
    │   └── UnmatchedError      a pattern matches nothing in the model
    ├── RebuildError            what an operator produced cannot be rebuilt exactly
    ├── ReportError             a report cannot be made: a file is not what it should be, or plotly is missing
    ├── RescueError             a step ran out of memory, and neither offloading nor a retry helped
    ├── RunDirectoryError       a run directory belongs to another run
    ├── SwapError               a swapped tensor could not be reloaded unchanged
    ├── TraceError              a Trace cannot be made or read
    ├── UnitError               a size or a duration cannot be read, such as "24 parsecs"
    ├── UnsupportedTorchError   this torch does not have a private name that a feature needs
    └── VerificationError       a run with lowtide differs from the same run without it

Every message says what was found, where, what was expected and what to do.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "InfeasibleError",
    "LaunchError",
    "LowtideError",
    "ModelError",
    "PatternError",
    "PlanError",
    "PolicyError",
    "RebuildError",
    "ReportError",
    "RescueError",
    "RunDirectoryError",
    "SwapError",
    "TraceError",
    "UnitError",
    "UnmatchedError",
    "UnsupportedTorchError",
    "VerificationError",
]


class LowtideError(Exception):
    """The base of every exception of lowtide."""


class CheckpointError(LowtideError):
    """A checkpoint cannot be written, or is damaged, or does not fit the run that reads it."""


class ConfigError(LowtideError):
    """A configuration file cannot be used; the message lists every problem with its position."""


class DataError(LowtideError):
    """Training data cannot be read, or does not fit the model."""


class LaunchError(LowtideError):
    """The processes of a run cannot be started, or do not find each other."""


class ModelError(LowtideError):
    """A model cannot be understood: it has no layers, or no such module."""


class PlanError(LowtideError):
    """No plan can be made: the budget, the device or the layout is not possible."""


class InfeasibleError(PlanError):
    """Nothing fits the budget. ``plan`` is the :class:`~lowtide.Plan` that needs least: what it needs, and why."""

    def __init__(self, message: str, plan: Any) -> None:
        super().__init__(message)
        self.plan = plan


class PolicyError(LowtideError):
    """A Policy cannot be read, or does not fit the model it is resolved against."""


class PatternError(PolicyError):
    """A pattern is not written as the pattern language asks."""


class UnmatchedError(PolicyError):
    """A pattern matches nothing in the model."""


class RebuildError(LowtideError):
    """What a recomputed operator produced cannot be rebuilt exactly."""


class ReportError(LowtideError):
    """A report cannot be made: a file is not what it should be, or a package is missing."""


class RescueError(LowtideError):
    """A step ran out of memory, and what could be offloaded was not enough, or the step could not be retried."""


class RunDirectoryError(LowtideError):
    """A run directory belongs to another run, or another run is writing into it."""


class SwapError(LowtideError):
    """A swapped tensor could not be reloaded unchanged: a copy or the disk failed, or it was changed in place."""


class TraceError(LowtideError):
    """A Trace cannot be made of a model, or cannot be read."""


class VerificationError(LowtideError):
    """A run with lowtide differs from the same run without it, or a reloaded tensor differs."""


class UnitError(LowtideError, ValueError):
    """A size or a duration cannot be read."""


class UnsupportedTorchError(LowtideError, ImportError):
    """This torch does not have a private name that a feature needs."""

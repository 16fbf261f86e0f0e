"""Curves in Weights & Biases, where its package is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lowtide.errors import ConfigError
from lowtide.train.monitors.scalars import scalars
from lowtide.train.record import StepRecord

__all__ = ["WandB"]


class WandB:
    """Sends each step's numbers to a run of Weights & Biases; the same ``identity`` continues the same run.

    Project, entity and mode are those of its environment variables, such as ``WANDB_PROJECT`` and ``WANDB_MODE``.
    """

    def __init__(self, directory: Path, *, identity: str, config: dict[str, Any] | None = None) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "Weights & Biases was asked for, and its package is not installed: pip install 'lowtide[wandb]'"
            ) from error
        self._run = wandb.init(dir=str(directory), id=identity, resume="allow", config=config or {})

    def step(self, record: StepRecord) -> None:
        """Send the step."""
        self._run.log(scalars(record), step=record.step)

    def close(self) -> None:
        """Send what is left and end the run."""
        self._run.finish()

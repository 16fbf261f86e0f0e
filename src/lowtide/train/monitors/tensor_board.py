"""Curves in TensorBoard, where its package is installed."""

from __future__ import annotations

from pathlib import Path

from lowtide.errors import ConfigError
from lowtide.train.monitors.scalars import scalars
from lowtide.train.record import StepRecord

__all__ = ["TensorBoard"]


class TensorBoard:
    """Writes each step to event files in ``directory``; what an earlier try wrote after ``after`` is hidden."""

    def __init__(self, directory: Path, *, after: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "TensorBoard was asked for, and its package is not installed: pip install 'lowtide[tensorboard]'"
            ) from error
        self._writer = SummaryWriter(str(directory), purge_step=after + 1 if after else None)

    def step(self, record: StepRecord) -> None:
        """Write the step."""
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        """Write what is left and close."""
        self._writer.close()

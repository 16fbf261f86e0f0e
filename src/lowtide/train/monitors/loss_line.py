"""The loss in the log, as the users of MindSpore Transformers know it."""

from __future__ import annotations

import datetime
import logging

from lowtide.train.record import StepRecord

__all__ = ["LossLine", "format_loss_line"]

logger = logging.getLogger(__name__)

WIDTH = 50
"""Characters of the bar in the second line."""


class LossLine:
    """Logs two lines every ``every`` steps: the loss and what belongs to it, then how far the run is and how fast.

    ``LossLine(every=10, samples_per_step=64, ranks=8)``
    """

    def __init__(self, *, every: int = 1, separate: bool = False, samples_per_step: int, ranks: int) -> None:
        self._every = every
        self._separate = separate
        self._samples_per_rank = samples_per_step / ranks

    def step(self, record: StepRecord) -> None:
        """Log the step, if it is its turn; the last step of the run is always logged."""
        if record.step % self._every and record.step != record.steps:
            return
        logger.info("%s", format_loss_line(record, separate=self._separate))
        done = record.step / record.steps
        bar = "█" * int(WIDTH * done)
        left = datetime.timedelta(seconds=int((record.steps - record.step) * record.seconds))
        speed = self._samples_per_rank / record.seconds if record.seconds > 0 else 0.0
        rates = f"{speed:.5f} samples/s/p, {record.tokens_per_second:,.0f} tokens/s"
        if record.mfu is not None:
            rates += f", MFU {record.mfu:.1%}"
        logger.info("  %4.1f%% |%-*s| %s  %s }", 100 * done, WIDTH, bar, rates, left)

    def close(self) -> None:
        """Nothing is open."""


def format_loss_line(record: StepRecord, *, separate: bool = False) -> str:
    """The first of the two lines; ``separate`` adds the parts of the loss."""
    parts = "".join(f", {name}_loss: {value:5.6f}" for name, value in record.losses.items()) if separate else ""
    norm = "None" if record.global_norm is None else f"[{_number(record.global_norm)}]"
    return (
        f"{{ Epoch:[{record.epoch:3d}/{record.epochs:3d}], step:[{record.step_in_epoch:5d}/{record.steps_in_epoch:5d}],"
        f" loss: {record.loss:5.6f}{parts}, per_step_time: {int(record.seconds * 1000):d}ms,"
        f" lr: {_number(record.learning_rate)}, overflow cond: {record.overflow},"
        f" loss_scale: {_number(record.loss_scale)}, global_norm: {norm}"
    )


def _number(value: float) -> str:
    """As a float32 prints in the reference: 0.0, 1e-05, 44.313248."""
    return repr(float(f"{value:.8g}"))

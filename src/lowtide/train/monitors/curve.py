"""The losses of a run as one line, when it ends."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lowtide.train.record import StepRecord

__all__ = ["Curve", "sparkline"]

logger = logging.getLogger(__name__)

WIDTH = 60
"""Characters of the curve."""
LEVELS = "▁▂▃▄▅▆▇█"


class Curve:
    """Logs how the loss went and how fast the run was; holds a few numbers, however long the run is."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._every = 1
        self._steps = self._tokens = 0
        self._first = self._last = self._seconds = 0.0

    def step(self, record: StepRecord) -> None:
        """Take the step's loss; of a long run, every so many steps'."""
        if not self._steps:
            self._first = record.loss
        else:  # the first step makes what the others find made
            self._tokens += record.tokens
            self._seconds += record.seconds
        self._last = record.loss
        self._steps += 1
        if self._steps % self._every == 0:
            self._losses.append(record.loss)
        if len(self._losses) > 2 * WIDTH:
            self._losses, self._every = self._losses[1::2], 2 * self._every

    def close(self) -> None:
        """Log the line."""
        if self._steps > 1:
            speed = f", {self._tokens / self._seconds:,.0f} tokens/s" if self._seconds else ""
            logger.info(
                "loss %.4f -> %.4f in %d steps%s  %s",
                self._first,
                self._last,
                self._steps,
                speed,
                sparkline(self._losses),
            )


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """Values as a curve of at most ``width`` characters, each the mean of its share.

    >>> sparkline([4.0, 3.0, 2.0, 1.0])
    '█▆▃▁'
    """
    finite = [value for value in values if abs(value) < float("inf")]
    if not finite:
        return ""
    count = min(width, len(finite))
    shares = [finite[len(finite) * i // count : len(finite) * (i + 1) // count] for i in range(count)]
    means = [sum(share) / len(share) for share in shares]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(LEVELS[round((mean - low) / span * (len(LEVELS) - 1))] for mean in means)

"""The share of routed slots that experts drop, in the log: the guide's ``MoEDropRateCallback``."""

from __future__ import annotations

import logging

from lowtide.train.drop_rate import line
from lowtide.train.record import StepRecord

__all__ = ["DropRate"]

logger = logging.getLogger(__name__)


class DropRate:
    """Logs ``layer: 3, drop_rate: 0.32500`` for each layer with a router, after each step."""

    def step(self, record: StepRecord) -> None:
        """Log the step's rates."""
        for layer, rate in sorted(record.drop_rates.items()):
            logger.info("%s", line(layer, rate))

    def close(self) -> None:
        """Nothing is open."""

"""A window of steps in torch's profiler: the file's ``profile`` keys."""

from __future__ import annotations

import logging
from pathlib import Path

from torch.profiler import profile

from lowtide.train.logs import OF_EACH_RANK
from lowtide.train.record import StepRecord

__all__ = ["Profile"]

logger = logging.getLogger(__name__)


class Profile:
    """Profiles the steps ``first`` to ``last`` and writes a trace that Perfetto and chrome://tracing open."""

    def __init__(self, file: Path, *, begun: int, first: int, last: int, memory: bool) -> None:
        self._file, self._first, self._last = file, first, last
        self._profile: profile | None = profile(profile_memory=memory) if last >= max(first, begun + 1) else None
        self._running = False
        self._start(begun + 1)

    def step(self, record: StepRecord) -> None:
        """A step is over: begin before the first of the window, end after its last."""
        if self._running and record.step >= self._last:
            self.close()
        self._start(record.step + 1)

    def close(self) -> None:
        """Write what was profiled."""
        if self._profile is not None and self._running:
            self._profile.stop()
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self._file))
            logger.info("profile written to %s", self._file, extra=OF_EACH_RANK)
            self._profile, self._running = None, False

    def _start(self, coming: int) -> None:
        if self._profile is not None and not self._running and coming >= self._first:
            self._profile.start()
            self._running = True

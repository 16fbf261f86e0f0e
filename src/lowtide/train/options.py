"""What the command line says about a run, in addition to its file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lowtide.errors import ConfigError
from lowtide.train.watchdog import reported_after

__all__ = ["TrainOptions", "restarted"]

ROUND = "LOWTIDE_ROUND"
"""Counts the starts of all ranks together, from 1, in the processes that the launcher starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """What the command line says about a run that the file does not."""

    run_directory: Path
    """Where everything of the run is written; the file's `output_dir` unless said otherwise."""
    log_dir: Path
    """Where each rank writes its `worker_N.log`."""
    dry_run: bool = False
    """Build everything without memory, print the plan of the run, and stop."""
    json: bool = False
    """Print one JSON object at the end."""
    resume: str | None = None
    """`auto`, or the path of a checkpoint; None decides by what the run directory holds."""
    fresh: bool = False
    """Move an earlier run in the run directory aside and start from the beginning."""
    watchdog: float | None = None
    """Seconds without progress after which each rank says where it is stuck; 0 for never; None for half of
    `timeout`."""
    track: tuple[str, ...] = ()
    """Who else gets each step's numbers: ``tensorboard``, ``wandb``."""
    timeout: float = 1800.0
    """Seconds to wait for other ranks, at the start and in a collective."""
    redirect: bool = False
    """Whether what a rank prints, and what libraries print in it, goes to its log instead of the terminal."""
    device: str | None = None
    """Whose peak MFU is measured against: a known device's name or a calibrated one's file; None for the one here."""
    stop_signal: str = "USR1"
    """The signal on which the run saves and stops, as on SIGTERM; `none` for SIGTERM alone."""
    restarted: bool = False
    """Whether torchrun started this process again after a failure: the run then goes on by itself."""

    def __post_init__(self) -> None:
        """ConfigError where ranks would give up on each other before the watchdog has said which of them is stuck."""
        reported = reported_after(self.watchdog_seconds)
        if reported > self.timeout:
            raise ConfigError(
                f"--watchdog {self.watchdog_seconds:g} and --timeout {self.timeout:g}: collectives would fail before"
                f" the watchdog has reported, which takes {reported:g} s; give --timeout more,"
                " or leave --watchdog out, which is then half of it"
            )

    @property
    def watchdog_seconds(self) -> float:
        """Seconds without progress after which each rank says where it is stuck; 0 for never."""
        return self.timeout / 2 if self.watchdog is None else self.watchdog


def restarted() -> bool:
    """Whether this process was started again after a failure, of its own or of another rank."""
    if ROUND in os.environ:
        return os.environ[ROUND] != "1"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") not in ("", "0")

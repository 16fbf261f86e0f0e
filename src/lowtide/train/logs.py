"""Where one rank's lines go: its ``worker_N.log``, and on rank 0 the terminal.

Only the logger ``lowtide`` is touched, never the root logger. A line ends as the MindSpore Transformers guide shows it,
``-INFO - Set op_swap at layer 0: attention.flash_attention, value=10``, so that the guide's ``grep`` commands find it.

What all ranks know alike, rank 0 says. Another rank's log has its warnings and errors, what is logged with
``extra=OF_EACH_RANK``, and what else is printed in it; a rank without any of it leaves no file. With ``GLOG_v=0`` every
rank logs everything.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from lowtide.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["OF_EACH_RANK", "Logs", "level_of", "log_file", "start_logging", "warnings_in_log"]

logger = logging.getLogger(__name__)

PREFIX = "lowtide: "
"""How lowtide's own warnings begin."""

OF_EACH_RANK = {"of_each_rank": True}
"""The ``extra`` of a line below a warning that is not the same on all ranks."""

LEVELS = {"0": logging.DEBUG, "1": logging.INFO, "2": logging.WARNING, "3": logging.ERROR}
"""What the values of GLOG_v mean."""


@dataclass(slots=True, eq=False)
class Logs:
    """The open log of one rank."""

    file: Path
    """This rank's log."""
    console: Console | None
    """The terminal, on rank 0: a progress bar drawn on it leaves log lines whole."""
    _handlers: list[logging.Handler]
    _before: tuple[int, bool]

    def close(self) -> None:
        """Restore the logger."""
        logger = logging.getLogger("lowtide")
        for handler in self._handlers:
            logger.removeHandler(handler)
            handler.close()
        self._handlers.clear()
        logger.setLevel(self._before[0])
        logger.propagate = self._before[1]

    def remove_empty(self) -> None:
        """Remove the file if there is nothing in it: with standard error redirected it is there from the start.

        For the end of a run that went well: an error is printed after the log is closed.
        """
        try:
            if self.file.stat().st_size == 0:
                self.file.unlink()
        except FileNotFoundError:
            pass


def start_logging(
    rank: int,
    log_dir: Path,
    *,
    continued: bool = False,
    redirect: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> Logs:
    """Open ``worker_N.log`` for this rank, when it has something to say, and the terminal on rank 0.

    A log of an earlier run is renamed to ``worker_N.1.log`` (the next free number), never overwritten; ``continued``
    (a restart of the same run) appends to it. ``redirect`` also sends what else is printed in this process, a traceback
    or a library's message, to the log: standard error of every rank, standard output of all but rank 0.
    """
    file = log_file(log_dir, rank)
    log_dir.mkdir(parents=True, exist_ok=True)
    if not continued:
        _put_aside(file)
    level = level_of(environment)
    logger = logging.getLogger("lowtide")
    before = (logger.level, logger.propagate)
    pattern = f"%(asctime)s [rank {rank}] %(filename)s:%(lineno)d -%(levelname)s - %(message)s"
    to_file = logging.FileHandler(file, mode="a", encoding="utf-8", delay=rank != 0)
    to_file.setFormatter(logging.Formatter(pattern))
    if rank != 0 and level > logging.DEBUG:
        to_file.addFilter(lambda line: line.levelno >= logging.WARNING or hasattr(line, "of_each_rank"))
    handlers: list[logging.Handler] = [to_file]
    console: Console | None = None
    if rank == 0:
        console = _console(redirect)
        terminal = _Terminal(console)
        terminal.setFormatter(logging.Formatter("%(levelname)s - %(message)s"))
        handlers.append(terminal)
    if redirect:
        _redirect(file, everything=rank != 0)
    for handler in handlers:
        logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False  # a handler of the root logger would print each line again
    if environment.get("ENABLE_LAZY_INLINE_NO_PIPELINE"):
        logger.info("ENABLE_LAZY_INLINE_NO_PIPELINE is not needed: swap works here without pipelining as it is")
    return Logs(file, console, handlers, before)


@contextmanager
def warnings_in_log() -> Iterator[None]:
    """Lowtide's own Python warnings as lines of the log, which is where users of the runner look; others as before."""
    show = warnings.showwarning

    def shown(message: Any, category: type[Warning], *place: Any, **more: Any) -> None:
        text = str(message)
        if text.startswith(PREFIX):
            logger.warning("%s", text.removeprefix(PREFIX))
        else:
            show(message, category, *place, **more)

    warnings.showwarning = shown
    try:
        yield
    finally:
        warnings.showwarning = show


def level_of(environment: Mapping[str, str] = os.environ) -> int:
    """The level that ``GLOG_v`` asks for, INFO unless it is set.

    >>> level_of({"GLOG_v": "2"}) == logging.WARNING
    True
    """
    text = environment.get("GLOG_v", "1")
    if text not in LEVELS:
        raise ConfigError(f"GLOG_v is {text!r}; expected 0 (DEBUG), 1 (INFO), 2 (WARNING) or 3 (ERROR)")
    return LEVELS[text]


def log_file(log_dir: Path, rank: int) -> Path:
    """The log of one rank."""
    return log_dir / f"worker_{rank}.log"


class _Terminal(logging.Handler):
    """Prints through rich, which keeps a progress bar below the lines."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        try:
            style = {logging.WARNING: "yellow", logging.ERROR: "red"}.get(record.levelno)
            self.console.print(self.format(record), style=style, markup=False, highlight=False, soft_wrap=True)
        except Exception:
            self.handleError(record)


def _console(redirect: bool) -> Console:
    from rich.console import Console

    stream: TextIO = sys.stderr
    if redirect:  # standard error will be the log; keep the terminal that it is now
        stream = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="replace", buffering=1)
    return Console(file=stream, highlight=False, markup=False, emoji=False)


def _redirect(file: Path, *, everything: bool) -> None:
    """Point this process's standard streams at the log, for what C++ prints too."""
    sys.stderr.flush()
    sys.stdout.flush()
    # Appending, as the logging handler does: the system then puts every write at the end, whichever process writes.
    log = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(log, 2)
    if everything:
        os.dup2(log, 1)
    os.close(log)


def _put_aside(file: Path) -> None:
    """Rename the log of an earlier run; only this rank writes this file, so there is no race."""
    if not file.exists():
        return
    number = 1
    while (aside := file.with_name(f"{file.stem}.{number}.log")).exists():
        number += 1
    file.rename(aside)

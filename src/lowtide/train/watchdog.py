"""Says where each rank is stuck when a job hangs, and ends it if asked, so that torchrun restarts it.

In a hang nearly all ranks wait for one. Each rank notes its place as it goes; when the place has not changed for the
timeout, a thread of that rank writes the place and the stacks of all threads to its log, and the place to a file. Rank
0 then reads the files of all ranks, once, and writes which rank is where: the ranks that differ from most are the
ones to look at.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

__all__ = ["ENDED", "Place", "Watchdog", "reported_after", "summary_of"]

logger = logging.getLogger(__name__)

ENDED = 75
"""The exit code of a process that the watchdog ended: the system's "temporary failure, try again"."""
NO_WORD = "no word: ended, or not hanging"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is."""

    phase: str
    """What it is doing: ``data``, ``forward``, ``backward``, ``optimizer``, ``checkpoint``."""
    step: int
    """In which step."""
    micro: int
    """In which micro-batch of the step."""

    def __str__(self) -> str:
        return f"{self.phase} of step {self.step}, micro-batch {self.micro}"


class Watchdog:
    """Watches one rank.

    >>> watchdog = Watchdog(Path("output/watchdog"), rank=0, world_size=1, timeout=1800)  # doctest: +SKIP
    >>> watchdog.at("forward", 7)  # doctest: +SKIP
    >>> watchdog.close()  # doctest: +SKIP
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        world_size: int,
        timeout: float = 1800.0,
        end: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        """``timeout`` is in seconds; ``end`` ends the process after the report; ``stream`` is a file, or stderr."""
        self._directory, self._rank, self._world_size = directory, rank, world_size
        self._timeout, self._end = timeout, end
        self._stream = stream if stream is not None else sys.__stderr__
        self._interval = _interval(timeout)
        self._place: tuple[str, int, int, float] | None = None
        self._stopped = threading.Event()
        self._file = directory / f"rank_{rank:05d}.json"
        directory.mkdir(parents=True, exist_ok=True)
        self._file.unlink(missing_ok=True)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def at(self, phase: str, step: int, micro: int = 0, patience: float = 0.0) -> None:
        """Note where this rank is. Costs one tuple: call it as often as there is something to report.

        ``patience`` is how long it may stay there, in seconds, where that is longer than the timeout.
        """
        self._place = (phase, step, micro, patience)

    def rest(self) -> None:
        """Nothing is expected to move until the next :meth:`at`: a load, a compilation, an evaluation."""
        self._place = None

    def close(self) -> None:
        """Stop watching."""
        self._stopped.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        # Every call of ``at`` makes a tuple of its own, and the one last seen is held here: another object is progress.
        seen, since, reported = self._place, time.monotonic(), False
        while not self._stopped.wait(self._interval):
            self._arm()
            now = self._place
            if now is not seen:
                if reported:
                    logger.warning("rank %d moves again after %.0f s", self._rank, time.monotonic() - since)
                    self._file.unlink(missing_ok=True)
                seen, since, reported = now, time.monotonic(), False
            elif now is not None and not reported and time.monotonic() - since >= max(self._timeout, now[3]):
                reported = True
                self._report(now, time.monotonic() - since)

    def _arm(self) -> None:
        """Have the stacks written if not even this thread can run, because some extension never gives up Python's lock.

        The timer is one in C, for the whole process; this thread sets it back as long as it runs.
        """
        if self._stream is not None:
            faulthandler.dump_traceback_later(self._timeout + 8 * self._interval, file=self._stream, exit=self._end)

    def _report(self, noted: tuple[str, int, int, float], seconds: float) -> None:
        place = Place(*noted[:3])
        try:
            self._say(f"rank {self._rank} has not moved for {seconds:.0f} s: {place}")
            if self._stream is not None:
                faulthandler.dump_traceback(self._stream, all_threads=True)
                self._stream.flush()
            self._leave(place)
            # The others noted their last place before this rank's timeout or shortly after, and look as often as this.
            if self._stopped.wait(2 * self._interval):
                return
            if self._rank == 0:
                self._say(summary_of(read_places(self._directory), self._world_size))
        except OSError as error:
            logger.warning("the watchdog of rank %d cannot report: %s", self._rank, error)
        if self._end and not self._stopped.wait(0 if self._rank == 0 else 4 * self._interval):  # rank 0 reports first
            if self._place is not noted:
                return  # it moves again
            self._say(f"rank {self._rank} ends itself with exit code {ENDED}")
            os._exit(ENDED)

    def _leave(self, place: Place) -> None:
        unfinished = self._file.with_suffix(".tmp")
        unfinished.write_text(json.dumps([place.phase, place.step, place.micro]))
        unfinished.rename(self._file)

    def _say(self, text: str) -> None:
        if self._stream is not None:
            print(f"watchdog: {text}", file=self._stream, flush=True)


def reported_after(timeout: float) -> float:
    """Seconds without progress after which every rank has reported, and has ended itself if asked.

    >>> reported_after(800)
    870.0
    """
    return timeout + 7 * _interval(timeout)  # one until the thread looks, two for the others' reports, four to the end


def _interval(timeout: float) -> float:
    """How often the thread looks, and waits for the other ranks to notice the hang as well."""
    return min(timeout / 8, 10.0)


def read_places(directory: Path) -> dict[int, Place]:
    """The places that hanging ranks left."""
    found: dict[int, Place] = {}
    for path in directory.glob("rank_*.json"):
        try:
            content: Any = json.loads(path.read_text())
            found[int(path.stem.removeprefix("rank_"))] = Place(*content)
        except (OSError, ValueError, TypeError):  # just being written, or gone: that rank has no word
            continue
    return found


def summary_of(places: Mapping[int, Place], world_size: int) -> str:
    """Which ranks are where, the largest group last, so that those that differ are seen first.

    >>> print(summary_of({0: Place("forward", 7, 0), 2: Place("forward", 7, 0), 1: Place("data", 7, 0)}, 3))
    3 ranks hang:
      1 rank (1): data of step 7, micro-batch 0
      2 ranks (0, 2): forward of step 7, micro-batch 0
    """
    groups: dict[str, list[int]] = {}
    for rank in range(world_size):
        place = places.get(rank)
        groups.setdefault(NO_WORD if place is None else str(place), []).append(rank)
    lines = [
        f"  {len(ranks)} {'rank' if len(ranks) == 1 else 'ranks'} ({_ranges(ranks)}): {where}"
        for where, ranks in sorted(groups.items(), key=lambda one: len(one[1]))
    ]
    if world_size > 1 and len(groups) == 1:
        lines.append("  no rank is missing: look at the network between them")
    return "\n".join([f"{len(places)} ranks hang:", *lines])


def _ranges(ranks: Iterable[int], most: int = 8) -> str:
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:most]]
    return ", ".join(shown) + (f" and {len(runs) - most} more ranges" if len(runs) > most else "")

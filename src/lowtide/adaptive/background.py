"""Plans that are made in a process of their own, while training goes on.

A thread would not do: the planner is Python, and a thread that runs Python delays every operator that another thread
issues. The process imports no torch, ignores Ctrl-C, and ends when the pipe to the run is closed, however the run ends.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any

from lowtide.adaptive.decide import Decided, Situation, decide
from lowtide.adaptive.lengths import Shape
from lowtide.adaptive.settings import AdaptSettings
from lowtide.errors import LowtideError

__all__ = ["BackgroundPlanner", "serve"]

logger = logging.getLogger(__name__)

_PROGRAM = """
import sys
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
sys.path[:] = pipe.recv()
from lowtide.adaptive.background import serve
serve(pipe)
"""


class BackgroundPlanner:
    """Makes plans one after the other. The process starts with the first of them."""

    def __init__(self) -> None:
        self.waiting: set[Shape] = set()
        """The shapes whose plans are being made."""
        self.broken = False
        """Whether there can be no such process, or it has died."""
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection[Any, Any] | None = None
        self._questions: SimpleQueue[Any] = SimpleQueue()
        """What a thread sends: a pipe is full until the other end has read it, and training does not wait for that."""

    def ask(self, shape: Shape, situation: Situation, settings: AdaptSettings, *, rescued: bool) -> None:
        """Let the plan of a shape be made. No-op if the process is broken."""
        try:
            if self._pipe is None and not self.broken:
                self._start()
        except OSError as error:
            self._fail(error)
        if not self.broken:
            self.waiting.add(shape)
            self._questions.put((shape, situation, settings, rescued))

    def arrived(self) -> dict[Shape, Decided | None]:
        """The plans that were made since the last call; None where the planner has failed."""
        found: dict[Shape, Decided | None] = {}
        try:
            while self.waiting and self._pipe is not None and self._pipe.poll():
                shape, decided = self._pipe.recv()
                self.waiting.discard(shape)
                found[shape] = decided
        except (OSError, EOFError) as error:
            self._fail(error)
        return found

    def close(self) -> None:
        """End the process."""
        process, pipe = self._process, self._pipe
        self._pipe = self._process = None
        self.waiting.clear()
        self._questions.put(None)
        self._questions = SimpleQueue()
        if process is not None:
            process.kill()
            process.wait()
        if pipe is not None:
            pipe.close()

    def _start(self) -> None:
        ours, theirs = Pipe()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # the solver prints; if it dies, plans are made here and say why
                )
        except BaseException:
            ours.close()
            raise
        self._pipe = ours
        self._questions.put(sys.path)
        Thread(target=_send, args=(ours, self._questions), name="lowtide plans", daemon=True).start()

    def _fail(self, error: Exception) -> None:
        logger.debug("plans are not made in the background: %r", error)
        self.broken = True
        self.close()


def _send(pipe: Connection[Any, Any], questions: SimpleQueue[Any]) -> None:
    """Send what is asked until that is None, or there is no reader any more."""
    with suppress(OSError):
        while (question := questions.get()) is not None:
            pipe.send(question)


def serve(pipe: Connection[Any, Any]) -> None:
    """Make plans until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(5)
    with suppress(EOFError, OSError):
        while True:
            shape, situation, settings, rescued = pipe.recv()
            decided: Decided | None = None
            with suppress(LowtideError):
                decided = decide(situation, settings, rescued=rescued)
            pipe.send((shape, decided))

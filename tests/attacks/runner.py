"""Attacks in processes of their own: forked from one that has imported everything, and ended when they hang.

An attack starts in milliseconds and finds a process in which nothing was trained (:mod:`support.forked`).
"""

from __future__ import annotations

import faulthandler
import os
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from attacks.catalogue import ATTACKS, CHECKS
from attacks.outcome import Finding, Outcome, examine
from support.forked import forking

__all__ = ["Runner"]

LATE = 5.0
"""Seconds that a child gets on top of its limit, to start and to say where it hangs."""


class Runner:
    """Runs attacks one after another, each in a child of its own."""

    def __init__(self, *, quick: bool = False) -> None:
        self.quick = quick
        self._context = forking()

    def run(self, name: str) -> Outcome:
        """The outcome of the attack of that name; ``hung`` if it gives none in its time."""
        chosen = (ATTACKS | CHECKS)[name]
        receiver, sender = self._context.Pipe(duplex=False)
        with tempfile.NamedTemporaryFile("r", prefix="attack-") as log:
            child = self._context.Process(target=_child, args=(name, self.quick, sender, log.name, chosen.seconds))
            child.start()  # the first one waits until everything is imported
            begin = time.monotonic()
            sender.close()
            outcome = _answer(receiver, chosen.seconds + LATE)
            if outcome is None and child.is_alive():
                child.kill()
            child.join()
            receiver.close()
            if outcome is not None:
                return outcome
            seconds = time.monotonic() - begin
            hung = seconds > chosen.seconds
            text = " ".join(log.read().split())[:800] or f"the process ended with {child.exitcode}"
            finding = Finding("the process", "hung" if hung else "crashed", text)
        return Outcome(name, chosen.tries, (finding,), seconds)


def _answer(receiver: Connection[Any, Any], seconds: float) -> Outcome | None:
    try:
        if receiver.poll(seconds):
            outcome: Outcome = receiver.recv()
            return outcome
    except EOFError:  # the child is gone
        pass
    return None


def _child(name: str, quick: bool, sender: Connection[Any, Any], log: str, seconds: float) -> None:
    import tide  # noqa: F401  before the first backward, which starts a thread for each device there is

    torch.set_num_threads(1)
    with open(log, "w") as file:
        faulthandler.enable(file)
        faulthandler.dump_traceback_later(seconds, file=file)
        sender.send(examine((ATTACKS | CHECKS)[name], quick=quick))
        file.flush()
        os._exit(0)  # autograd's device thread may still drop a graph, and abort an orderly exit

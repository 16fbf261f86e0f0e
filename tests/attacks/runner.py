"""Attacks in processes of their own: forked from one that has imported everything, and ended when they hang.

The process that is forked has torch, lowtide and transformers loaded and has not touched a device, so that an attack
starts in milliseconds and finds a process in which nothing was trained. tide, which cannot be forked, is imported by
the child.
"""

from __future__ import annotations

import faulthandler
import os
import tempfile
import time
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from attacks.catalogue import ATTACKS, CHECKS
from attacks.outcome import Finding, Outcome, examine

__all__ = ["Runner"]

LATE = 5.0
"""Seconds that a child gets on top of its limit, to start and to say where it hangs."""


class Runner:
    """Runs attacks one after another, each in a child of its own."""

    def __init__(self, *, quick: bool = False) -> None:
        self.quick = quick
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(["attacks.preloaded"])
        # The server is started with the environment, and not with this process's path.
        sources = str(Path(__file__).parents[1])
        path = os.pathsep.join(filter(None, (sources, os.environ.get("PYTHONPATH", ""))))
        with mock.patch.dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1"):
            forkserver.ensure_running()

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

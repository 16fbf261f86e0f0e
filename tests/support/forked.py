"""Processes that have everything imported when they start: they are forked from one that did nothing else.

That one has torch, lowtide and transformers loaded and has not touched a device. tide, which cannot be forked, is
imported by a process that needs it.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch.multiprocessing as multiprocessing

__all__ = ["Ended", "forking", "run_lowtide", "run_script"]

SAID = (".output.txt", ".error.txt")
"""Where a process writes what it says, in its folder."""


class Ended(NamedTuple):
    """How a script ended."""

    code: int | None
    """None if it did not end in time."""
    output: str
    error: str


def forking() -> Any:
    """What starts such processes; each is given a function and its arguments, as with any other start method.

    A process has one server that forks, whose imports are fixed when it starts: all its users share this one.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.preloaded"])
    # The server is started with the environment, and not with this process's path.
    sources = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, (sources, os.environ.get("PYTHONPATH", ""))))
    with mock.patch.dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    return context


def run_script(script: Path, arguments: list[str], folder: Path, *, timeout: float = 300) -> Ended:
    """``python script arguments`` in ``folder``, but for the start of Python and the imports."""
    return _ended(_script, script, arguments, folder, timeout)


def run_lowtide(arguments: list[str], folder: Path, *, timeout: float = 600) -> Ended:
    """``lowtide arguments`` in ``folder``; the ranks that it launches are started as ever."""
    return _ended(_lowtide, Path("lowtide"), arguments, folder, timeout)


def _ended(program: Callable[[Path], None], name: Path, arguments: list[str], folder: Path, timeout: float) -> Ended:
    process = forking().Process(target=_run, args=(program, name, arguments, folder, dict(os.environ)))
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
        return Ended(None, *_said(folder))
    return Ended(process.exitcode, *_said(folder))


def _said(folder: Path) -> tuple[str, str]:
    output, error = ((folder / name).read_text() for name in SAID)
    return output, error


def _run(
    program: Callable[[Path], None], name: Path, arguments: list[str], folder: Path, environment: dict[str, str]
) -> None:
    os.chdir(folder)
    os.environ.clear()  # that of the process that it is forked from is older
    os.environ.update(environment, COLUMNS="200")
    for said, stream in zip(SAID, (sys.stdout, sys.stderr), strict=True):
        with open(said, "w") as file:
            os.dup2(file.fileno(), stream.fileno())
    sys.argv = [str(name), *arguments]
    program(name)


def _script(script: Path) -> None:
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def _lowtide(_: Path) -> None:
    from lowtide.cli.entry import run

    run()

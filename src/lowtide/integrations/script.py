"""Run a training script that knows nothing of lowtide: as ``python script.py`` would, but adapted to its device."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from lowtide.errors import LowtideError
from lowtide.integrations.discovery import Discovery
from lowtide.integrations.settings import Settings

__all__ = ["Outcome", "is_first_rank", "run_script"]


@dataclass(frozen=True)
class Outcome:
    """What came of a script."""

    discovery: Discovery
    error: BaseException | None
    """What ended it; its traceback begins in the script."""
    pages: tuple[Path, ...]
    """The reports that were written."""

    def as_json(self) -> dict[str, Any]:
        """What it was attached to, and why it was not."""
        found, exit_ = self.discovery.found, self.error
        return {
            "attached": [
                {"model": one.model, "layers": one.layers, "path": one.path, "optimizers": list(one.optimizers)}
                for one in found
            ],
            "refused": self.discovery.refusals if found else [self.discovery.why_nothing()],
            "pages": [str(one) for one in self.pages],
            "error": None if exit_ is None or _is_success(exit_) else type(exit_).__name__,
        }


def run_script(name: str, arguments: Sequence[str], settings: Settings, *, module: bool = False) -> Outcome:
    """Run a script, or a module, by its name, and attach to what it trains.

    The first rank says in a line on standard error what was attached to, or why nothing was.
    """
    discovery = Discovery(settings, _say)
    error: BaseException | None = None
    try:
        with _as_program(name, arguments, module=module), discovery.searching():
            if module:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(name, run_name="__main__")
    except BaseException as raised:  # also what ends a program: the caller goes on as python would
        error = raised.with_traceback(_inside(raised.__traceback__))
    if not discovery.found and not discovery.refusals and (error is None or _is_success(error)):
        _say(f"attached to nothing: {discovery.why_nothing()}")
    return Outcome(discovery, error, tuple(_pages(discovery)))


@contextmanager
def _as_program(name: str, arguments: Sequence[str], *, module: bool) -> Iterator[None]:
    """What a program finds when it begins: its arguments, and where its imports are searched for."""
    argv, path = sys.argv, sys.path[0]
    sys.argv = [name, *arguments]
    sys.path[0] = os.getcwd() if module else str(Path(name).resolve().parent)
    try:
        yield
    finally:
        sys.argv, sys.path[0] = argv, path


def _inside(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without what runs the script."""
    inner = trace
    while inner is not None and inner.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        inner = inner.tb_next
    return inner or trace


def _is_success(error: BaseException) -> bool:
    return isinstance(error, SystemExit) and error.code in (None, 0)


def is_first_rank() -> bool:
    """Whether this process is the one that prints; a launcher says which rank it is."""
    return os.environ.get("RANK", "0") == "0"


def _say(text: str) -> None:
    if is_first_rank():
        with suppress(OSError):  # a reader that has gone away does not end the script
            print(f"lowtide: {text}", file=sys.stderr, flush=True)


def _pages(discovery: Discovery) -> Iterator[Path]:
    """Write the page of each run that has a directory; what fails is said."""
    for found in discovery.found:
        if found.directory is None:
            continue
        from lowtide.report.page import write_page
        from lowtide.report.run import read_directory

        page = found.directory / "report.html"
        try:
            write_page(page, *read_directory(found.directory))
        except (LowtideError, OSError) as error:
            _say(f"no page of {found.model}: {error}")
        else:
            _say(f"page: {page}")
            yield page

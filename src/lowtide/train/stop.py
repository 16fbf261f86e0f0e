"""Asked to stop, by SIGTERM or by the signal of a scheduler that pre-empts: save at the end of the step, and end.

[Note: how ranks stop together]
A signal reaches the launcher, or some ranks, or all; the ranks of other nodes may get none. So each rank adds "I was
asked to" to the one all-reduce that a step has anyway (its loss), and after it every rank knows. They save the step as
any other, and end.

The launcher passes the signal on in a file, which ranks look for once a step: a rank that is still importing torch
cannot miss it, and nothing is sent to a process that does not handle signals yet. Ranks end with exit code 0, so that
the launcher starts none of them again, and leave a mark, from which it knows its own exit code.

Some schedulers signal every process of a job, so ranks handle the signals too. But torch's agent also sends SIGTERM to
the ranks that are left when one has failed, and these wait in a collective that never ends: they must end at once. The
file tells the two apart: a rank of our launcher takes SIGTERM as a request only if the launcher has had one. The
handler is a thread, which a collective does not block; Python's own handlers run on the main thread.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from lowtide.errors import LaunchError

__all__ = ["STOPPED", "StopForwarder", "StopRequest", "stop_signals"]

STOPPED = 85
"""The exit code of a run that saved and ended because it was asked to: start it again, and it continues."""
FILE = "LOWTIDE_STOP_FILE"
"""In the ranks, the file in which the launcher says that they are to stop."""
NOW = "now"
"""What the file says when the ranks are to end without saving."""
MARK = ".saved"
"""The ending of the file that ranks leave when they have saved and stopped."""
PATIENCE = 1.0
"""Seconds that a rank waits for its launcher to say that it got SIGTERM as well."""


def stop_signals(name: str) -> tuple[signal.Signals, ...]:
    """SIGTERM and the signal of that name, with or without SIG; ``none`` for SIGTERM alone.

    >>> [one.name for one in stop_signals("USR1")]
    ['SIGTERM', 'SIGUSR1']
    """
    if name.lower() == "none":
        return (signal.SIGTERM,)
    text = name.upper() if name.upper().startswith("SIG") else f"SIG{name.upper()}"
    possible = ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGTERM", "SIGXCPU", "SIGALRM", "SIGURG", "SIGCONT")
    if text not in possible:
        raise LaunchError(
            f"--stop-signal {name}: no signal that a run can stop on; expected one of"
            f" {', '.join(one.removeprefix('SIG') for one in possible)}, or none"
        )
    return tuple(dict.fromkeys((signal.SIGTERM, signal.Signals[text])))


class StopRequest:
    """Whether this rank was asked to stop; a context in which it handles the signals. See [Note: how ranks stop
    together].

    >>> with StopRequest(()) as request:
    ...     request.signal_name is None
    True
    """

    def __init__(self, signals: tuple[signal.Signals, ...], environment: Mapping[str, str] = os.environ) -> None:
        self._signals = signals
        self._file = Path(environment[FILE]) if FILE in environment else None
        self._name: str | None = None
        self._before: list[tuple[signal.Signals, Any]] = []
        self._pipe: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        self._wakeup = -1

    @property
    def signal_name(self) -> str | None:
        """The signal that asked this rank to stop; None for none so far."""
        if self._name is None and (said := self._said()) is not None:
            self._name = said
        return self._name

    def saved(self) -> int:
        """This rank has saved and stops: the exit code to end with."""
        if self._file is None:
            return STOPPED
        self._file.with_suffix(MARK).touch()
        return 0  # the launcher would start a failed rank again

    def __enter__(self) -> StopRequest:
        if not self._signals or threading.current_thread() is not threading.main_thread():
            return self
        read, write = os.pipe()
        os.set_blocking(write, False)
        self._pipe = (read, write)
        self._wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._before = [(one, signal.signal(one, _nothing)) for one in self._signals]
        self._thread = threading.Thread(target=self._watch, args=(read,), name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pipe is None or self._thread is None:
            return
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before:
            signal.signal(number, handler)
        read, write = self._pipe
        os.close(write)  # ends the thread
        self._thread.join()
        os.close(read)
        self._pipe = None

    def _watch(self, read: int) -> None:
        while number := os.read(read, 1):
            if (got := signal.Signals(number[0])) in self._signals:
                self._take(got)

    def _take(self, got: signal.Signals) -> None:
        if got != signal.SIGTERM:
            self._name = self._name or got.name
        elif self._file is None:
            if self._name == got.name:
                _end_by(got)  # the second time
            self._name = got.name
        else:
            end = time.monotonic() + PATIENCE
            while (said := self._said()) is None and time.monotonic() < end:
                time.sleep(0.02)
            if said in (None, NOW):
                _end_by(got)
            self._name = said

    def _said(self) -> str | None:
        if self._file is None:
            return None
        try:
            return self._file.read_text(encoding="ascii") or None
        except OSError:
            return None


class StopForwarder:
    """In the launcher: passes the signals on to its ranks. A second SIGTERM ends them without saving."""

    def __init__(self, signals: tuple[signal.Signals, ...], directory: Path) -> None:
        self._signals, self._file = signals, directory / "stop"
        self._before: list[tuple[signal.Signals, Any]] = []

    def environment(self) -> dict[str, str]:
        """What the ranks need to know."""
        return {FILE: str(self._file)} if self._signals else {}

    def start(self, end: Callable[[signal.Signals], None]) -> None:
        """Handle the signals from now on; ``end`` ends the ranks, without saving. Before, they end the launcher."""
        if self._before:
            return  # a restart of the ranks

        def handle(number: int, frame: FrameType | None) -> None:
            got = signal.Signals(number)
            if not self._file.exists():
                self._say(got.name)
            elif got == signal.SIGTERM and self._file.read_text(encoding="ascii") == got.name:
                self._say(NOW)
                end(got)
            elif got == signal.SIGTERM:
                self._say(got.name)  # after another signal: the scheduler's last word before it kills

        self._before = [(one, signal.signal(one, handle)) for one in self._signals]

    def close(self) -> None:
        """Restore the handlers."""
        for number, handler in self._before:
            signal.signal(number, handler)
        self._before = []

    def stopped(self) -> bool:
        """Whether the ranks saved and stopped."""
        return self._file.with_suffix(MARK).exists()

    def _say(self, text: str) -> None:
        unfinished = self._file.with_suffix(".tmp")
        unfinished.write_text(text, encoding="ascii")
        unfinished.replace(self._file)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Python must have a handler, so that it writes the signal to the pipe."""


def _end_by(number: signal.Signals) -> None:
    """End this process as the signal does when it is not handled; from any thread."""
    ctypes.CDLL(None).signal(int(number), None)
    os.kill(os.getpid(), number)

"""Files that are made once and read by every rank."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = ["build_once", "digest_of"]


def digest_of(*parts: object) -> str:
    """A short name for what a cached file was made from."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def build_once(target: Path, build: Callable[[Path], None]) -> None:
    """Make ``target`` if it is not there; ``build`` gets the path of a file to write, which then takes its name.

    [Note: many ranks, one file] What makes this safe is the rename: a file has its name only when it is complete, and
    two ranks that both made it made the same bytes. The lock only saves work: ranks of one host wait for the first
    instead of doing it too. Some network file systems do not pass locks between hosts; then each host builds once.
    """
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_name(target.name + ".lock"), "w") as lock:
        with suppress(OSError, ImportError):  # a file system, or a system, without locks: see the note
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return
        draft = target.with_name(f"{target.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}")
        try:
            build(draft)
            os.replace(draft, target)
        finally:
            draft.unlink(missing_ok=True)

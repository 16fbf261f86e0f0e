"""Race reports: two accesses to the same bytes, at least one a write, in no order."""

from __future__ import annotations

from dataclasses import dataclass

from . import _C


class RaceError(AssertionError):
    """Unordered accesses were found."""


@dataclass(frozen=True, slots=True)
class Access:
    """One side of a race."""

    what: str
    """The operator, or "copy host to device", "allocate", "host read", ..."""
    agent: str
    """ "host" or "stream n"."""
    node: str
    """The autograd node that was running, or ""."""
    stack: tuple[tuple[str, int, str], ...]
    """File, line, function; innermost first."""

    def __str__(self) -> str:
        where = f" in {self.node}" if self.node else ""
        frames = "".join(f"\n      {file}:{line} in {name}" for file, line, name in self.stack[:12])
        return f"{self.what} on {self.agent}{where}{frames}"


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses that nothing orders. `first` was issued first."""

    kind: str
    """ "write after write", "read after write" or "write after read"."""
    first: Access
    second: Access
    nbytes: int

    def __str__(self) -> str:
        return f"{self.kind}, {self.nbytes} bytes\n    {self.first}\n  against\n    {self.second}"


def _access(entry: dict) -> Access:
    # Agents count from the host; stream numbers are torch's, default streams being 0.
    agent = entry["agent"]
    devices = _C.device_count()
    name = "host" if agent == 0 else f"stream {agent if agent > devices else 0}"
    return Access(entry["what"], name, entry["node"], tuple(entry["stack"]))


def races() -> list[Race]:
    """All races found since the last `clear_races()` or `reset()`."""
    return [
        Race(entry["kind"], _access(entry["first"]), _access(entry["second"]), entry["bytes"])
        for entry in _C.races()
    ]


def clear_races() -> None:
    """Forget the reports, not what is in flight."""
    _C.clear_races()


def check_races() -> None:
    """Raise `RaceError` with every report, if there is one."""
    found = races()
    if found:
        text = "\n".join(f"{number}. {race}" for number, race in enumerate(found, 1))
        raise RaceError(f"{len(found)} unordered access{'es' * (len(found) > 1)}:\n{text}")

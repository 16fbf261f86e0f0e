"""What swapping may take, as a file says it: ``limits`` of ``swap_config`` (graph layout) or ``swap`` (2026)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from lowtide.config.document import Path
from lowtide.config.problem import Problems, nearest
from lowtide.errors import UnitError
from lowtide.policy import Policy, Swap
from lowtide.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SwapLimits", "read_limits"]

SIZES = ("host_bytes", "disk_bytes", "in_flight_bytes", "minimum_bytes")


class SwapLimits(NamedTuple):
    """The caps that a file sets, by the names that ``lowtide.Limits`` has; None where it says nothing."""

    host_bytes: int | None = None
    disk_bytes: int | None = None
    in_flight_bytes: int | None = None
    minimum_bytes: int | None = None
    disk_directory: str | None = None

    def given(self) -> dict[str, int | str]:
        """Those that the file sets."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def read_limits(
    section: object, policy: Policy, problems: Problems, path: Path, *, adaptive: bool = False
) -> SwapLimits:
    """Read ``limits`` of a section, and say which of them have no effect on ``policy``.

    An ``adaptive`` run swaps what its plan says, which is not known here.
    """
    value = section.get("limits") if isinstance(section, dict) else None
    here = (*path, "limits")
    if value is None:
        return SwapLimits()
    known = SwapLimits._fields
    if not isinstance(value, dict):
        problems.error(
            here, f"`limits` is a mapping of {', '.join(known)}; found {value!r:.60}", "limits: {host_bytes: 64GiB}"
        )
        return SwapLimits()
    sizes: dict[str, int] = {}
    for key, written in value.items():
        if key not in known:
            close = nearest(str(key), known)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
            problems.error((*here, key), f"`limits` has no `{key}`", hint, key=True)
        elif key in SIZES and (size := _size(written, problems, (*here, key))) is not None:
            sizes[key] = size
    directory = value.get("disk_directory")
    if directory is not None and not isinstance(directory, str):
        problems.error((*here, "disk_directory"), f"`disk_directory` is a path; found {directory!r:.60}", "write text")
        directory = None
    limits = SwapLimits(**sizes, disk_directory=directory)
    tiers = set(_tiers(policy))
    if adaptive:
        return limits
    if not tiers:
        problems.warn(here, "`limits` has no effect: nothing is swapped", "turn swap on, or leave it out")
    elif "disk" not in tiers:
        for key in ("disk_bytes", "disk_directory"):
            if value.get(key) is not None:
                problems.warn((*here, key), f"`{key}` has no effect: no entry has tier: disk", "add tier: disk")
    return limits


def _tiers(policy: Policy) -> Iterator[str]:
    for layer in policy.layers:
        for decision in (layer.default, layer.boundary, *(rule.decision for rule in layer.rules)):
            if isinstance(decision, Swap):
                yield decision.tier


def _size(value: object, problems: Problems, path: Path) -> int | None:
    try:
        if isinstance(value, bool) or not isinstance(value, (int, str)) or (isinstance(value, str) and len(value) > 40):
            raise UnitError(f"found {value!r:.60}")
        size = parse_bytes(value)
        if size > 2**63 - 1:
            raise UnitError(f"found {value!r:.60}")
    except UnitError as error:
        problems.error(path, f"`{path[-1]}` is a size: {error}", 'write "64GiB", or a number of bytes')
        return None
    return size

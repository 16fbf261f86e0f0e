"""Read and print sizes and durations the way people write them: ``"24GiB"``, ``"1.3ms"``."""

from __future__ import annotations

import re

from lowtide.errors import UnitError

__all__ = ["format_bytes", "format_seconds", "parse_budget", "parse_bytes", "parse_seconds"]

_BYTES = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    **{f"{letter}{ending}": 1 << (10 * power) for power, letter in enumerate("KMGT", 1) for ending in ("", "I", "IB")},
}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-zµ]*)\s*", re.ASCII)


def parse_bytes(text: str | int) -> int:
    """Return the number of bytes that ``text`` names.

    ``KB``, ``MB`` and ``GB`` are powers of ten; ``KiB``, ``MiB`` and ``GiB`` are powers of two, and so are ``K``, ``M``
    and ``G`` alone, as Docker, Slurm and the JVM read them.

    >>> parse_bytes("24GiB")
    25769803776
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise UnitError(f"a size cannot be negative: {text}")
        return text
    number, unit = _split(text, 'a size such as "24GiB" or "58GB", or a whole number of bytes')
    scale = _BYTES.get(unit.upper())
    if scale is None:
        raise UnitError(f"unknown unit {unit!r} in {text!r}; expected one of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB")
    return round(number * scale)


_LEAST_BUDGET = 2**20


def parse_budget(text: str | int, what: str = "budget") -> int:
    """As :func:`parse_bytes`, for the memory of a device: a bare number below a mebibyte is refused.

    Who writes 80 means 80 GiB, and 80 bytes would be reported as a budget that nothing fits. ``what`` is the name that
    the error has for it.

    >>> parse_budget("60GiB")
    64424509440
    """
    size = parse_bytes(text)
    bare = isinstance(text, int) or not text.strip().rstrip(".").lstrip("0123456789.")
    if bare and 0 < size < _LEAST_BUDGET:
        raise UnitError(f'a {what} of {text} is {size} bytes; for {size} GiB write "{size}GiB"')
    return size


def parse_seconds(text: str | float) -> float:
    """Return the number of seconds that ``text`` names.

    >>> parse_seconds("1.5ms")
    0.0015
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        return float(text)
    number, unit = _split(text, 'a duration such as "1.3ms"')
    scale = _SECONDS.get(unit)
    if scale is None:
        raise UnitError(f"unknown unit {unit!r} in {text!r}; expected one of ns, us, ms, s, min, h")
    return number * scale


def format_bytes(count: int) -> str:
    """Print a number of bytes in the largest binary unit that keeps it at least one.

    >>> format_bytes(25769803776)
    '24 GiB'
    """
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= scale:
            return f"{_digits(count / scale)} {unit}"
    return f"{count} B"


def format_seconds(seconds: float) -> str:
    """Print a duration in the largest unit that keeps it at least one.

    >>> format_seconds(0.0013)
    '1.3 ms'
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= scale:
            return f"{_digits(seconds / scale)} {unit}"
    return f"{_digits(seconds / 1e-9)} ns"


def _digits(number: float) -> str:
    """Four digits, and no exponent for what is larger."""
    return f"{number:.4g}" if abs(number) < 9999.5 else f"{number:.0f}"


def _split(text: object, expected: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(text) if isinstance(text, str) else None
    if match is None or len(match[0]) > 40:
        raise UnitError(f"cannot read {text!r:.60}; expected {expected}")
    return float(match[1]), match[2]

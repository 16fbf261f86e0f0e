"""What the logs of both forms share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from lowtide.policy import Match

__all__ = ["Line", "operators_only"]

Line: TypeAlias = tuple[str, str]
"""A level, INFO or WARNING, and a text."""


def operators_only(found: Iterable[Match], what: str, prefix: str) -> list[Line]:
    """A line for each module, which can do nothing here, then one that names the operators."""
    lines: list[Line] = []
    operators: list[str] = []
    for match in found:
        if match.is_module:
            name = match.name if "." in match.name else f".{match.name}"
            text = f"For {what}, {name} is expected to be operation but got cell"
            lines.append(("INFO", f"{text}, this configuration will not be effective."))
        else:
            operators.append(match.name)
    if operators:
        lines.append(("INFO", prefix + ", ".join(operators)))
    return lines

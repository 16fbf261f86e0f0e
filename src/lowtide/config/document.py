"""A YAML document as plain values, with the line and column of every key and value."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

__all__ = ["Document", "Mark", "Path", "format_path"]

Path: TypeAlias = tuple[str | int, ...]
"""The path of a value in its document: ``("swap_config", "op_swap", 0, "layers")``."""


class Mark(NamedTuple):
    """A position in a file; both numbers count from one."""

    line: int
    column: int


@dataclass(slots=True, eq=False, repr=False)
class Document:
    """A parsed file: its text, its values, and the position of each."""

    name: str
    """The file's name, for messages."""
    text: str
    """The whole text, for showing a line with its caret."""
    value: Any = None
    """The plain value: dicts, lists, tuples, strings, numbers, booleans and None."""
    values: dict[Path, Mark] = field(default_factory=dict)
    """The position of each value."""
    keys: dict[Path, Mark] = field(default_factory=dict)
    """The position of each mapping key, under the path of its value."""

    def mark(self, path: Path, *, key: bool = False) -> Mark:
        """Return the position of ``path``, or of its nearest ancestor that the file has.

        ``key=True`` points at the key rather than at its value.
        """
        for length in range(len(path), -1, -1):
            here = path[:length]
            tables = (self.keys, self.values) if key or length < len(path) else (self.values, self.keys)
            for table in tables:
                if here in table:
                    return table[here]
        return Mark(1, 1)

    def line(self, number: int) -> str:
        """Return line ``number`` (from one), empty where the file has no such line."""
        lines = self.text.splitlines()
        return lines[number - 1] if 0 < number <= len(lines) else ""


def format_path(path: Path) -> str:
    """Write a path the way people do: ``swap_config.op_swap[0].layers``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif re.fullmatch(r"\w+", part):
            text += f".{part}" if text else part
        else:
            text += f"[{part!r}]"
    return text

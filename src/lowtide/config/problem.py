"""What is wrong with a file, or worth saying about it, each with its place."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from lowtide.config.document import Document, Mark, Path, format_path
from lowtide.errors import ConfigError

__all__ = ["Problem", "Problems", "nearest"]


class Problem(NamedTuple):
    """One finding: what was found, where, and what to do."""

    path: Path
    """Where in the document: ``("recompute_config", "recompute")``."""
    message: str
    """What was found and what was expected."""
    hint: str
    """What to do; may be empty."""
    line: int
    column: int

    def as_json(self) -> dict[str, str | int]:
        """The problem as ``lowtide check --json`` prints it."""
        return {
            "path": format_path(self.path),
            "line": self.line,
            "column": self.column,
            "message": self.message,
            "hint": self.hint,
        }


@dataclass(slots=True, eq=False)
class Problems:
    """Collects every problem of a file, so that all are shown at once."""

    document: Document | None = None
    """The file the paths refer to; gives each problem its line and column."""
    errors: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)

    def error(self, path: Path, message: str, hint: str = "", *, key: bool = False, mark: Mark | None = None) -> None:
        """Report an error at ``path``; ``key`` points at the key rather than at the value."""
        self.errors.append(self._problem(path, message, hint, key, mark))

    def warn(self, path: Path, message: str, hint: str = "", *, key: bool = True) -> None:
        """Report something accepted that the user should know."""
        self.warnings.append(self._problem(path, message, hint, key, None))

    def raise_errors(self) -> None:
        """Raise ConfigError with every error, if there are any."""
        if self.errors:
            name = self.document.name if self.document is not None else "<text>"
            raise ConfigError("\n".join(f"{name}:{p.line}:{p.column}: {p.message}" for p in self.errors))

    def _problem(self, path: Path, message: str, hint: str, key: bool, mark: Mark | None) -> Problem:
        if mark is None and self.document is not None:
            mark = self.document.mark(path, key=key)
        return Problem(path, message, hint, mark.line if mark else 1, mark.column if mark else 1)


def nearest(name: str, known: Iterable[str], *, count: int = 3) -> list[str]:
    """The known names closest to ``name``, nearest first.

    >>> nearest("recompte", ["recompute", "swap"])
    ['recompute']
    """
    # Long garbage cannot be a slip of the pen, and comparing it is slow.
    return difflib.get_close_matches(name[:100], sorted(set(known)), n=count, cutoff=0.6)

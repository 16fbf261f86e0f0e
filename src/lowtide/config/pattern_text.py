"""Patterns as a file writes them: what is wrong with one is reported at its position."""

from __future__ import annotations

from typing import Literal

from lowtide.config.document import Path
from lowtide.config.problem import Problems
from lowtide.errors import PatternError
from lowtide.policy import Pattern

__all__ = ["is_pattern"]

_HINTS = {
    "segments": "separate levels with \\. as in 'feed_forward\\.mul'",
    "path": "write a regular expression over the whole path, such as mlp.*",
}


def is_pattern(
    name: object, path: Path, problems: Problems, syntax: Literal["segments", "path"] = "segments", *, key: bool = True
) -> bool:
    """Whether ``name`` is a pattern; says so in ``problems`` if it is not. ``key``: it is a mapping's key."""
    try:
        if not isinstance(name, str):
            raise PatternError(f"a pattern is text; found {name!r:.60}")
        pattern = Pattern(name, syntax)
    except PatternError as error:
        problems.error(path, str(error), _HINTS[syntax], key=key)
        return False
    if syntax == "segments" and pattern.has_doubled_backslash:
        single = name.replace("\\\\", "\\")
        problems.warn(path, f"`{name}` is read with single backslashes", f"write '{single}'", key=key)
    return True

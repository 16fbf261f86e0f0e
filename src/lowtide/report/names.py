"""Many operators in few words."""

from __future__ import annotations

from collections.abc import Iterable

from lowtide.policy import NameTree

__all__ = ["shorten"]


def shorten(names: Iterable[str], tree: NameTree) -> str:
    """Name a module instead of all the operators below it, and the rest instead of most of a layer."""
    left = set(names)
    rest = {match.name for match in tree.walk() if not match.is_module} - left
    if len(rest) < len(left) / 4:
        return f"the whole layer but {shorten(rest, tree)}" if rest else "the whole layer"
    result: list[str] = []
    for match in sorted(tree.walk(), key=lambda match: (not match.is_module, match.name.count("."))):
        covered = set(tree.below(match.name)) if match.is_module else {match.name}
        if covered and covered <= left and not (match.is_module and len(covered) == 1):
            left -= covered
            result.append(match.name)
    order = {match.name: position for position, match in enumerate(tree.walk())}
    return ", ".join(sorted(result, key=order.__getitem__))

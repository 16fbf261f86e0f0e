"""What the logs of both forms share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from lowtide.policy import Catalogue, Match, NameTree, Operator, Pattern

__all__ = ["LayerNames", "Line", "operators_only"]

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


class LayerNames:
    """What lines about a layer call its operators: by the guide's name where they have one, by their own otherwise.

    ``guide`` are the guide's names, in its order; without them every name of an operator is printed.
    """

    def __init__(self, catalogue: Catalogue, guide: Sequence[str] = ()) -> None:
        self.layers, self.guide = catalogue.layers, guide
        self._tops = {name.partition(".")[0] for name in guide}
        self._trees: dict[int, tuple[NameTree, NameTree]] = {}
        self._found: dict[tuple[int, Pattern], tuple[Match, ...]] = {}

    def matches(self, pattern: Pattern, layer: int) -> tuple[Match, ...]:
        """What the pattern names in a layer, each operator or module once."""
        kind = self.layers[layer]
        key = id(kind), pattern
        if key not in self._found:
            short, full = self._trees.get(id(kind)) or self._trees.setdefault(id(kind), self._named(kind))
            self._found[key] = pattern.matches(short) or pattern.matches(full)
        return self._found[key]

    def _named(self, kind: tuple[Operator, ...]) -> tuple[NameTree, NameTree]:
        names = {one.name: (one.name, *one.aliases) for one in kind}
        every = dict.fromkeys(name for known in names.values() for name in known)
        if not self.guide:
            return NameTree.of(every), NameTree.of(every)
        short = dict.fromkeys(name for name in self.guide if name in every)
        for own, known in names.items():
            if not any(name in short for name in known):
                family = [name for name in known if name.partition(".")[0] in self._tops]
                short.update(dict.fromkeys(family or [own]))
        return NameTree.of(short), NameTree.of(every)

r"""The pattern language: which operators of a layer a setting means.

A pattern is read in one of two ways:

``segments``
    Split at the two characters ``\.``; each segment is a regular expression that must match a
    whole name. All but the last match child modules; the last matches operators, then child
    modules. Depth must be exact: ``feed_forward\.mul``, ``.*\.norm``.
``path``
    One regular expression over the whole dotted path: ``self_attention.*``.

A pattern that ends on a module means every operator below it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from lowtide.errors import PatternError

__all__ = ["Match", "NameTree", "Pattern"]

MAX_LENGTH = 200
MAX_SEGMENT = 64
MAX_REPEATS = 4

_SPECIAL = re.compile(r"[\\^$*+?{}\[\]|()]")


@dataclass(frozen=True, slots=True)
class Pattern:
    r"""Which operators a setting means.

    >>> tree = NameTree.of(["attention.wq.matmul", "feed_forward.mul"])
    >>> [match.name for match in Pattern(r"attention\.w.").matches(tree)]
    ['attention.wq']
    """

    text: str
    """The pattern as the user wrote it."""
    syntax: Literal["segments", "path"] = "segments"
    """How it is read."""

    def __post_init__(self) -> None:
        _compile(self.text, self.syntax)

    def __str__(self) -> str:
        return self.text

    @property
    def segments(self) -> tuple[str, ...]:
        """The regular expressions of the single levels; one for the ``path`` syntax."""
        return tuple(expression.pattern for expression in _compile(self.text, self.syntax))

    @property
    def has_doubled_backslash(self) -> bool:
        r"""Whether it was written ``a\\.b``, as tables print it; it is read as ``a\.b``."""
        return "\\\\." in self.text

    def matches(self, tree: NameTree) -> tuple[Match, ...]:
        """The operators and modules the pattern ends on, in the tree's order, each once."""
        expressions = _compile(self.text, self.syntax)
        if self.syntax == "path":
            return tuple(match for match in tree.walk() if expressions[0].fullmatch(match.name))
        return tuple(_descend(tree, expressions, ""))

    def operators(self, tree: NameTree, *, modules: bool = True) -> frozenset[str]:
        """The operators the pattern ends on and, with ``modules``, those below the modules it ends on."""
        names: set[str] = set()
        for match in self.matches(tree):
            if not match.is_module:
                names.add(match.name)
            elif modules:
                names.update(tree.below(match.name))
        return frozenset(names)

    def covers(self, other: Pattern) -> bool:
        """Whether each segment of one matches the same segment of the other, in either direction."""
        mine, theirs = _compile(self.text, self.syntax), _compile(other.text, other.syntax)
        return len(mine) == len(theirs) and all(
            a.fullmatch(b.pattern) or b.fullmatch(a.pattern) for a, b in zip(mine, theirs, strict=True)
        )

    def nearest(self, tree: NameTree, *, count: int = 3) -> tuple[str, ...]:
        """The names of the tree that look most like the pattern."""
        plain = re.sub(r"[\\^$*+?{}\[\]|()]", "", ".".join(self.segments))
        names = [match.name for match in tree.walk()]
        close = difflib.get_close_matches(plain, names, n=count, cutoff=0.5)
        if not close:  # a bare name such as "silu" is far from its path; compare it with last parts
            last = plain.rpartition(".")[2]
            close = [name for name in names if last and name.rpartition(".")[2] == last][:count]
        return tuple(close)


class Match(NamedTuple):
    """A name that a pattern ends on."""

    name: str
    """The dotted path inside the layer."""
    is_module: bool
    """Whether it is a module rather than an operator."""


class NameTree:
    """The operators of a layer by module, in order."""

    __slots__ = ("modules", "operators")

    def __init__(self) -> None:
        self.operators: list[str] = []
        """The operators of this module, by their last name."""
        self.modules: dict[str, NameTree] = {}
        """The child modules."""

    @staticmethod
    def of(names: Iterable[str]) -> NameTree:
        """Build the tree from dotted operator names; modules come in order of first appearance."""
        root = NameTree()
        for name in names:
            *parents, operator = name.split(".")
            module = root
            for parent in parents:
                module = module.modules.setdefault(parent, NameTree())
            module.operators.append(operator)
        return root

    def walk(self, prefix: str = "") -> Iterator[Match]:
        """Every operator, then every child module with what is below it."""
        for operator in self.operators:
            yield Match(prefix + operator, is_module=False)
        for name, module in self.modules.items():
            yield Match(prefix + name, is_module=True)
            yield from module.walk(f"{prefix}{name}.")

    def below(self, path: str) -> Iterator[str]:
        """The full names of all operators below the module at ``path``."""
        module = self
        for name in path.split("."):
            module = module.modules[name]
        return (match.name for match in module.walk(f"{path}.") if not match.is_module)


def _descend(tree: NameTree, expressions: tuple[re.Pattern[str], ...], prefix: str) -> Iterator[Match]:
    head, *rest = expressions
    if rest:
        for name, module in tree.modules.items():
            if head.fullmatch(name):
                yield from _descend(module, tuple(rest), f"{prefix}{name}.")
        return
    for operator in tree.operators:
        if head.fullmatch(operator):
            yield Match(prefix + operator, is_module=False)
    for name in tree.modules:
        if head.fullmatch(name):
            yield Match(prefix + name, is_module=True)


@lru_cache(maxsize=4096)
def _compile(text: str, syntax: str) -> tuple[re.Pattern[str], ...]:
    if not isinstance(text, str) or not text:
        raise PatternError("a pattern cannot be empty; write an operator's name such as `feed_forward\\.mul`")
    if len(text) > MAX_LENGTH:
        raise PatternError(f"a pattern has at most {MAX_LENGTH} characters; found {len(text)}")
    if syntax == "path":
        parts = [text]
    elif not _SPECIAL.search(text):
        parts = text.split(".")
    else:
        parts = text.replace("\\\\.", "\\.").split("\\.")
    if not all(parts):
        raise PatternError(f"`{text}` has an empty part; write names between the dots, such as `feed_forward\\.mul`")
    return tuple(_expression(part, text, MAX_LENGTH if syntax == "path" else MAX_SEGMENT) for part in parts)


def _expression(part: str, text: str, longest: int) -> re.Pattern[str]:
    if len(part) > longest:
        raise PatternError(f"a name in a pattern has at most {longest} characters; found {len(part)} in `{text}`")
    if _cost(part) > MAX_REPEATS:
        raise PatternError(
            f"`{text}` could take very long to match: at most {MAX_REPEATS} repetitions in a name, none of a group"
        )
    try:
        return re.compile(part)
    except (re.error, OverflowError, RecursionError) as error:
        raise PatternError(f"`{text}` is not a regular expression: {error}") from None


def _cost(part: str) -> int:
    """Count repetitions; a repeated group counts as too many, since its cost is exponential."""
    repeats, in_class, previous = 0, False, ""
    characters = iter(part)
    for character in characters:
        if character == "\\":
            next(characters, "")
            previous = "x"
            continue
        if in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character in "*+{" or (character == "?" and previous not in ("(", "*", "+", "}")):
            repeats += MAX_REPEATS + 1 if previous == ")" and character != "?" else 1
        previous = character
    return repeats

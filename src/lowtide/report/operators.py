"""What ``lowtide operators`` shows: the operators of each kind of layer, and their bytes."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from lowtide.policy import format_layers
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.operators.kinds import LayerKind
    from lowtide.operators.survey import Survey

__all__ = ["print_survey", "survey_as_json"]


def print_survey(found: Survey, console: Console) -> None:
    """Print a table for each kind of layer and for the root; operators that hold nothing are counted, not listed."""
    for place, kind in enumerate(found.kinds):
        layers = [index for index, which in enumerate(found.kind_of) if which == place]
        where = found.layers.path or "the model"
        console.print(f"{kind.name} ({kind.digest}): layers {format_layers(layers)} of {where}")
        _print_operators(kind, console)
        others = {"input": kind.boundary, "from outside": kind.root, "always kept": kind.kept, "weights": kind.static}
        _print_sum(kind, others, console)
    root = found.root
    console.print(f"{root.name}: outside the layers")
    _print_operators(root, console)
    others = {"from the layers": root.boundary + root.root, "always kept": root.kept, "weights": root.static}
    _print_sum(root, others, console)
    held = found.held
    console.print(
        f"{format_bytes(held.total)} held for backward in all: {format_bytes(held.layers)} in {len(found.kind_of)}"
        f" layers, {format_bytes(held.boundaries)} between them, {format_bytes(held.root)} outside;"
        f" always kept {format_bytes(held.kept)}, weights {format_bytes(held.static)}",
        soft_wrap=True,
    )


def _print_sum(kind: LayerKind, others: dict[str, int], console: Console) -> None:
    owned = sum(operator.owned for operator in kind.operators)
    holding = sum(operator.owned > 0 for operator in kind.operators)
    console.print(
        f"  {format_bytes(owned)} in {holding} operators; {len(kind.operators) - holding} more hold nothing; "
        + ", ".join(f"{name} {format_bytes(size)}" for name, size in others.items()),
        soft_wrap=True,
    )
    console.print()


def _print_operators(kind: LayerKind, console: Console) -> None:
    """The operators that hold something, each with its other names on a line of their own."""
    aliases = {operator.name: operator.aliases for operator in kind.catalogue}
    holding = [operator for operator in kind.operators if operator.owned]
    width = max([len("operator"), *(len(operator.name) for operator in holding)])
    console.print(Text(f"{'operator':<{width}}  {'owned':>11}  {'net':>11}  read by", style="bold"))
    for operator in holding:
        net = format_bytes(operator.net) if operator.net > 0 else "no gain"
        start = f"{operator.name:<{width}}  {format_bytes(operator.owned):>11}  {net:>11}  "
        _print_words(start, ", ".join(operator.consumers), console)
        if aliases[operator.name]:
            _print_words("  also ", ", ".join(aliases[operator.name]), console, style="dim")


def _print_words(start: str, words: str, console: Console, style: str = "") -> None:
    """Print words after ``start``, lines after the first below them."""
    lines = textwrap.wrap(words, max(console.width - len(start), 40), break_long_words=False) or [""]
    indent = " " * len(start)
    for number, line in enumerate(lines):
        console.print(Text(f"{indent if number else start}{line}".rstrip(), style=style), soft_wrap=True)


def survey_as_json(found: Survey) -> dict[str, Any]:
    """The same as plain JSON values."""
    return {
        "path": found.layers.path,
        "layers": len(found.kind_of),
        "kind_of": list(found.kind_of),
        "kinds": [_kind_as_json(kind) for kind in found.kinds],
        "root": _kind_as_json(found.root),
        "held": {**found.held._asdict(), "total": found.held.total},
    }


def _kind_as_json(kind: LayerKind) -> dict[str, Any]:
    return {
        "class": kind.name,
        "digest": kind.digest,
        "boundary": kind.boundary,
        "root": kind.root,
        "static": kind.static,
        "kept": kind.kept,
        "operators": [
            {**operator._asdict(), "consumers": list(operator.consumers), "aliases": list(known.aliases)}
            for operator, known in zip(kind.operators, kind.catalogue, strict=True)
        ],
    }

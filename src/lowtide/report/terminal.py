"""What ``lowtide check`` shows on a terminal: the log, the table of decisions, warnings and errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from lowtide.policy import Keep, NameTree, Recompute, ResolvedLayer, Swap, format_layers
from lowtide.report.names import shorten

if TYPE_CHECKING:
    from lowtide.config.check import Check
    from lowtide.config.problem import Problem

__all__ = ["print_check", "print_problems"]

_STYLES = {"recompute": "yellow", "swap": "cyan", "keep": "dim", "mixed": "magenta"}


def print_check(check: Check, console: Console) -> None:
    """Print the log lines and, for a file that is right, what becomes of each layer."""
    for level, text in check.log:
        if level == "WARNING":
            console.print(Text(f"{level} - {text}", style="yellow"), soft_wrap=True)
        else:  # there may be hundreds, and nothing to colour
            console.file.write(f"{level} - {text}\n")
    if check.resolution is None or check.form is None or check.policy is None:
        return
    placement = check.form.placement
    layers = check.resolution.layers
    if placement is None:
        return
    labels = _Labels(layers)
    picture = Text("\n")
    for columns in _blocks(check, labels, console.width):
        _draw(picture, check, labels, columns)
    for name, text, kind in labels.legend():
        first, *rest = _wrap(text, max(console.width - 7, 20))
        picture.append(f"  {name:<5}", style=_STYLES[kind])
        picture.append(first + "\n" + "".join(f"       {line}\n" for line in rest))
    chunks = f" x {placement.num_chunks} chunks" if placement.num_chunks > 1 else ""
    stages = f"{placement.num_stages} stage{'s' if placement.num_stages > 1 else ''}"
    more = len(layers) - placement.num_layers
    plural = "s" if more > 1 else ""
    extra = f" + {more} prediction layer{plural} like layer {placement.num_layers - 1}" if more else ""
    picture.append("  ok   ", style="bold green")
    picture.append(f"{placement.num_layers} layers{extra} over {stages}{chunks}; policy {check.policy.digest[:8]}")
    console.print(picture, soft_wrap=True)


def print_problems(check: Check, console: Console) -> None:
    """Print warnings and errors like a compiler: the place, the line with a caret, what to do."""
    for problem in check.problems.warnings:
        _print_problem(check, problem, "warning", "yellow", console)
    for problem in check.problems.errors:
        _print_problem(check, problem, "error", "red", console)
    count = len(check.problems.errors)
    if count:
        console.print(Text(f"{check.document.name}: {count} error{'s' if count > 1 else ''}", style="bold red"))


def _print_problem(check: Check, problem: Problem, kind: str, style: str, console: Console) -> None:
    line = check.document.line(problem.line)
    number = str(problem.line)
    margin = " " * len(number)
    shown, column = _clip(line, problem.column, max(console.width - len(number) - 4, 20))
    console.print(Text.assemble((kind, f"bold {style}"), f": {_printable(problem.message)}"), soft_wrap=True)
    console.print(
        Text(f"{margin}--> {check.document.name}:{problem.line}:{problem.column}", style="blue"), soft_wrap=True
    )
    if shown.strip():
        console.print(Text.assemble((f"{number} | ", "blue"), shown), soft_wrap=True)
        console.print(Text.assemble((f"{margin} | ", "blue"), (" " * (column - 1) + "^", style)), soft_wrap=True)
    hint = _printable(problem.hint).split("\n")
    if problem.hint:
        console.print(Text.assemble((f"{margin} = ", "blue"), ("help: ", "bold"), hint[0]), soft_wrap=True)
    for more in hint[1:]:
        console.print(Text.assemble((f"{margin} |   ", "blue"), more), soft_wrap=True)
    console.print()


def _clip(line: str, column: int, width: int) -> tuple[str, int]:
    """Cut a long line around the caret, and make what cannot be printed visible."""
    start = max(0, min(column - width // 2, len(line) - width))
    return _printable(line[start : start + width]).replace("\n", " "), column - start


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


class _Labels:
    """A short name for each distinct set of decisions: full, swap, keep, or a letter explained below."""

    def __init__(self, layers: Sequence[ResolvedLayer]) -> None:
        self.layers = layers
        self.names: dict[int, str] = {}
        self.kinds: dict[str, str] = {}
        self.texts: dict[str, str] = {}
        seen: dict[tuple[object, ...], str] = {}
        letters = _letters()
        for layer in layers:
            if id(layer) in self.names:
                continue
            key = (tuple(layer.decisions.items()), layer.boundary, layer.reissued_collectives, layer.kept_collectives)
            if key not in seen:
                seen[key] = self._name(layer, letters)
            self.names[id(layer)] = seen[key]

    def of(self, layer: int) -> str:
        return self.names[id(self.layers[layer])]

    def legend(self) -> Iterator[tuple[str, str, str]]:
        for name, text in self.texts.items():
            yield name, text, self.kinds[name]

    def _name(self, layer: ResolvedLayer, letters: Iterator[str]) -> str:
        kinds = {type(decision) for decision in layer.decisions.values()}
        plain = not layer.reissued_collectives and not layer.kept_collectives and layer.boundary == Keep()
        if plain and kinds <= {Keep}:
            name, kind = "keep", "keep"
        elif plain and kinds == {Recompute}:
            name, kind = "full", "recompute"
        else:
            name = next(letters)
            kind = "mixed" if {Recompute, Swap} <= kinds else "swap" if Swap in kinds else "recompute"
            kind = "keep" if kinds == {Keep} and layer.boundary == Keep() else kind
        self.kinds[name] = kind
        self.texts[name] = _describe(layer)
        return name


def _letters() -> Iterator[str]:
    count = 0
    while True:
        name, number = "", count
        while number >= 0:
            name = chr(ord("A") + number % 26) + name
            number = number // 26 - 1
        yield name
        count += 1


def _describe(layer: ResolvedLayer) -> str:
    tree = NameTree.of(layer.decisions)
    groups: dict[str, list[str]] = {}
    for name, decision in layer.decisions.items():
        if decision != Keep():
            groups.setdefault(str(decision), []).append(name)
    parts = [f"{decision} {shorten(names, tree)}" for decision, names in groups.items()]
    if layer.boundary != Keep():
        parts.append(f"{layer.boundary} the layer's input")
    if layer.reissued_collectives:
        parts.append(f"re-issue collectives of {', '.join(layer.reissued_collectives)}")
    if layer.kept_collectives:
        parts.append(f"keep collectives of {', '.join(layer.kept_collectives)}")
    return "; ".join(parts) or "every activation stays on the device"


def _blocks(check: Check, labels: _Labels, width: int) -> Iterator[list[int]]:
    """Which stages are shown side by side, so that the table fits the terminal."""
    assert check.form is not None
    assert check.form.placement is not None
    placement = check.form.placement
    used, block = 0, list[int]()
    for column in range(placement.num_stages):
        cells = [cell for chunk in range(placement.num_chunks) for cell in _cells(check, labels, column, chunk)]
        need = max([len("stage 99"), *(len(layers) + 1 + len(label) for layers, label in cells)]) + 2
        if block and 8 + used + need > width:
            yield block
            used, block = 0, []
        used += need
        block.append(column)
    yield block


def _draw(picture: Text, check: Check, labels: _Labels, columns: list[int]) -> None:
    """Add one block of stages: the stages across, the layers of each chunk down."""
    assert check.form is not None
    assert check.form.placement is not None
    placement = check.form.placement
    several = placement.num_chunks > 1
    names = [f"column {c}" if placement.folded else f"stage {c + placement.start_stage}" for c in columns]
    cells = [[_cells(check, labels, column, chunk) for column in columns] for chunk in range(placement.num_chunks)]
    widths = [
        max([len(name), *(len(layers) + 1 + len(label) for row in cells for layers, label in row[place])])
        for place, name in enumerate(names)
    ]
    header = "  ".join(f"{name:<{width}}" for name, width in zip(names, widths, strict=True))
    picture.append(f"{'chunk  ' if several else ''}{header}".rstrip() + "\n", style="bold")
    for chunk, row in enumerate(cells):
        for line in range(max((len(cell) for cell in row), default=0)):
            gap = f"{chunk if line == 0 else '':>5}  " if several else ""
            for cell, width in zip(row, widths, strict=True):
                layers, label = cell[line] if line < len(cell) else ("", "")
                picture.append(f"{gap}{layers} ")
                picture.append(label, style=_STYLES[labels.kinds[label]] if label else "")
                gap = " " * (width - len(layers) - 1 - len(label) + 2)
            picture.rstrip()
            picture.append("\n")
    picture.append("\n")


def _cells(check: Check, labels: _Labels, column: int, chunk: int) -> list[tuple[str, str]]:
    """The layers of one mini-stage with their label, equal neighbours together: ``2-3``, ``A``."""
    assert check.form is not None
    assert check.form.placement is not None
    placement = check.form.placement
    groups: list[tuple[str, list[int]]] = []
    for layer, (c, k) in enumerate(zip(placement.columns, placement.chunks, strict=True)):
        if (c, k) != (column, chunk):
            continue
        name = labels.of(layer)
        if groups and groups[-1][0] == name:
            groups[-1][1].append(layer)
        else:
            groups.append((name, [layer]))
    return [(f"{format_layers(layers):>5}", name) for name, layers in groups]


def _wrap(text: str, width: int) -> list[str]:
    """Break a line at blanks."""
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(word)
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    return lines

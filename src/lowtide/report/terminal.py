"""What ``lowtide check`` shows on a terminal: the log, the table of decisions, warnings and errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lowtide.policy import Keep, NameTree, Recompute, ResolvedLayer, Swap, format_layers

if TYPE_CHECKING:
    from lowtide.config.check import Check
    from lowtide.config.problem import Problem

__all__ = ["print_check", "print_problems"]

_STYLES = {"recompute": "yellow", "swap": "cyan", "keep": "dim", "mixed": "magenta"}


def print_check(check: Check, console: Console) -> None:
    """Print the log lines and, for a file that is right, what becomes of each layer."""
    for level, text in check.log:
        console.print(Text(f"{level} - {text}", style="yellow" if level == "WARNING" else ""), soft_wrap=True)
    if check.resolution is None or check.form is None or check.policy is None:
        return
    placement = check.form.placement
    layers = check.resolution.layers
    if placement is None:
        return
    labels = _Labels(layers)
    console.print()
    for columns in _blocks(check, labels, console.width):
        console.print(_table(check, labels, columns))
    legend = Table.grid(padding=(0, 1))
    for name, text, kind in labels.legend():
        legend.add_row(Text(f"  {name:<4}", style=_STYLES[kind]), Text(text))
    console.print(legend)
    chunks = f" x {placement.num_chunks} chunks" if placement.num_chunks > 1 else ""
    stages = f"{placement.num_stages} stage{'s' if placement.num_stages > 1 else ''}"
    more = len(layers) - placement.num_layers
    extra = f" + {more} prediction layers as layer {placement.num_layers - 1}" if more else ""
    console.print(
        Text.assemble(
            ("  ok   ", "bold green"),
            f"{placement.num_layers} layers{extra} over {stages}{chunks}; policy {check.policy.digest[:8]}",
        ),
        soft_wrap=True,
    )


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
            key = (tuple(layer.decisions.items()), layer.boundary, layer.repeated_collectives, layer.kept_collectives)
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
        plain = not layer.repeated_collectives and not layer.kept_collectives and layer.boundary == Keep()
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
    parts = [f"{decision} {_shorten(names, tree)}" for decision, names in groups.items()]
    if layer.boundary != Keep():
        parts.append(f"{layer.boundary} the layer's input")
    if layer.repeated_collectives:
        parts.append(f"repeat collectives of {', '.join(layer.repeated_collectives)}")
    if layer.kept_collectives:
        parts.append(f"keep collectives of {', '.join(layer.kept_collectives)}")
    return "; ".join(parts) or "every activation stays on the device"


def _shorten(names: Iterable[str], tree: NameTree) -> str:
    """Name a module instead of all the operators below it."""
    left = set(names)
    if left == {match.name for match in tree.walk() if not match.is_module}:
        return "the whole layer"
    result: list[str] = []
    for match in sorted(tree.walk(), key=lambda match: (not match.is_module, match.name.count("."))):
        covered = set(tree.below(match.name)) if match.is_module else {match.name}
        if covered and covered <= left and not (match.is_module and len(covered) == 1):
            left -= covered
            result.append(match.name)
    order = {match.name: position for position, match in enumerate(tree.walk())}
    return ", ".join(sorted(result, key=order.__getitem__))


def _blocks(check: Check, labels: _Labels, width: int) -> Iterator[list[int]]:
    """Which stages stand side by side, so that the table fits the terminal."""
    assert check.form is not None
    assert check.form.placement is not None
    placement = check.form.placement
    used, block = 0, list[int]()
    for column in range(placement.num_stages):
        cells = [cell for chunk in range(placement.num_chunks) for cell in _cells(check, labels, column, chunk)]
        need = max([len("column 99"), *(len(cell) for cell in cells)]) + 2
        if block and 8 + used + need > width:
            yield block
            used, block = 0, []
        used += need
        block.append(column)
    yield block


def _table(check: Check, labels: _Labels, columns: list[int]) -> Table:
    assert check.form is not None
    assert check.form.placement is not None
    placement = check.form.placement
    table = Table(box=None, pad_edge=False, padding=(0, 1), show_header=True, header_style="bold")
    several = placement.num_chunks > 1
    if several:
        table.add_column("chunk", justify="right")
    for column in columns:
        name = f"column {column}" if placement.folded else f"stage {column + placement.start_stage}"
        table.add_column(name, no_wrap=True)
    for chunk in range(placement.num_chunks):
        cells = [_cells(check, labels, column, chunk) for column in columns]
        height = max((len(cell) for cell in cells), default=0)
        for row in range(height):
            texts = [cell[row] if row < len(cell) else Text("") for cell in cells]
            table.add_row(*([Text(str(chunk) if row == 0 else "")] if several else []), *texts)
        if several and chunk < placement.num_chunks - 1:
            table.add_section()
    return table


def _cells(check: Check, labels: _Labels, column: int, chunk: int) -> list[Text]:
    """The layers of one mini-stage, equal neighbours together: ``2-3 A``."""
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
    return [
        Text.assemble(f"{format_layers(layers):>5} ", (name, _STYLES[labels.kinds[name]])) for name, layers in groups
    ]

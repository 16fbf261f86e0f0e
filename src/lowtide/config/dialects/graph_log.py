"""The graph form in the words of the MindSpore Transformers guide: ``Formative …``, ``Set … at layer i``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, cast

from lowtide.config.dialects.graph import GraphForm
from lowtide.config.dialects.log import LayerNames, Line, operators_only
from lowtide.config.swap_entries import SwapEntry
from lowtide.policy import Match, Pattern

__all__ = ["form_log", "layer_log"]

_PRIORITY = "The configuration of select_recompute_exclude and select_comm_recompute_exclude have the highest priority."


def form_log(form: GraphForm) -> list[Line]:
    """The lines about the whole file: placement, normal form, conflicts."""
    lines = form.placement.log()
    lines.append(("INFO", f"Formative layer_recompute: {form.layer_recompute}"))
    lines.append(("INFO", _PRIORITY))
    for key, name in form.removed:
        lines.append(("INFO", f"The pattern {name} in {key} conflicts with {key}_exclude and will be removed."))
    value = form.normalized()
    for key in (
        "select_recompute",
        "select_comm_recompute",
        "select_recompute_exclude",
        "select_comm_recompute_exclude",
    ):
        lines.append(("INFO", f"Formative {key}: {_python(value[key])}"))
    if form.swap.swap:
        lines.append(("INFO", f"Formative layer swap: {_python(value['layer_swap'])}"))
        lines.append(("INFO", f"Formative op swap: {_python(value['op_swap'])}"))
        lines += [("WARNING", text) for text in _conflicts(form)]
    return lines


def layer_log(form: GraphForm, names: LayerNames) -> list[Line]:
    """The lines about each layer, with the operators that its patterns name."""
    lines: list[Line] = []
    patterns: dict[str, Pattern] = {}

    def matches(name: str, layer: int) -> tuple[Match, ...]:
        if name not in patterns:
            patterns[name] = Pattern(name)
        return names.matches(patterns[name], layer)

    on = "" if form.swap.swap else " on"
    for layer in range(form.placement.num_layers):

        def named(chosen: list[str], layer: int = layer) -> list[Match]:
            return list(dict.fromkeys(match for name in chosen for match in matches(name, layer)))

        if form.is_on(form.layer_recompute, layer):
            if not (form.swap.swap and form.layer_recompute is True):
                lines.append(("INFO", f"Set full recompute at layer {layer}"))
        else:
            chosen = ", ".join(match.name for match in named(form.names_on("select_recompute", layer)))
            if chosen:
                lines.append(("INFO", f"Set select recompute{on} at layer {layer}: {chosen}"))
            found = named(form.names_on("select_comm_recompute", layer))
            lines += operators_only(
                found, "communication recompute", f"Set select comm recompute{on} at layer {layer}: "
            )
        if form.swap.swap:
            lines += [("INFO", text) for text in _swap_lines(form, layer, matches)]
        else:
            for kind in ("", " comm"):
                found = named(form.names_on(f"select{kind.replace(' ', '_')}_recompute_exclude", layer))
                lines += operators_only(
                    found,
                    "select recompute/comm_recompute exclude",
                    f"Set select{kind} recompute exclude at layer {layer}: ",
                )
    return lines


def _swap_lines(form: GraphForm, layer: int, matches: Callable[[str, int], tuple[Match, ...]]) -> Iterator[str]:
    for entry in form.swap.layer_swap:
        if entry.has(layer):
            yield f"Set layer swap at layer {layer} and value is: {entry.prefetch}"
            break
    parts = []
    for name, entries in form.swap.op_swap:
        prefetch = next((entry.prefetch for entry in entries if entry.has(layer)), None)
        if prefetch is not None:
            for match in matches(name, layer):
                path = match.name if "." in match.name else f".{match.name}"
                parts.append(f"{path}, value={prefetch}")
    if parts:
        yield f"Set op_swap at layer {layer}: {', '.join(parts)}"


def _conflicts(form: GraphForm) -> Iterator[str]:
    """What recompute takes from swap, in the words and the order of the reference."""
    whole = form.swap.layer_swap
    operators = {
        name: {layer for entry in entries for layer in _indices(form, entry)} for name, entries in form.swap.op_swap
    }
    recomputed = cast("list[int] | Literal[True]", form.layer_recompute)  # indices, since swap is on
    if recomputed is True:
        yield "All layers and ops that are enabled swap do not work! Because recompute = True."
    else:
        # The reference says it once for each layer_swap entry, and once for each operator.
        yield from (_conflict("All", layer) for layer in recomputed for entry in whole if entry.has(layer))
        for name, layers in operators.items():
            yield from (_conflict(name, layer) for layer in recomputed if layer in layers)
    for name, selection in cast("dict[str, list[int] | Literal[True]]", form.written_select).items():
        if selection is True:
            if whole or name in operators:  # the reference says it even where nothing is swapped
                yield f"{name} operator in all layers that is enabled swap do not work! {_BECAUSE}"
            continue
        yield from (_conflict(name, layer) for layer in selection for entry in whole if entry.has(layer))
        yield from (_conflict(name, layer) for layer in selection if layer in operators.get(name, ()))


_BECAUSE = "Because it is enabled recompute."


def _conflict(name: str, layer: object) -> str:
    return f"{name} operator in layer {layer} that is enabled swap do not work! {_BECAUSE}"


def _indices(form: GraphForm, entry: SwapEntry) -> Iterable[int]:
    return range(form.placement.num_layers) if entry.layers is True else entry.layers


def _python(value: object) -> str:
    """Print like Python, with the backslashes of patterns single, as the guide shows them."""
    return repr(value).replace("\\\\", "\\")

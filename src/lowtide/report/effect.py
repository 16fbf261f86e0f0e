"""What ``lowtide check --model`` adds: the operators that each setting decides, and the bytes it frees."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from lowtide.policy import NameTree, format_layers
from lowtide.report.names import shorten
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.operators.effect import Effect, SettingEffect
    from lowtide.operators.survey import Survey

__all__ = ["effect_as_json", "print_effect", "remarks"]

_MANY = 6
"""More operators than these are shown by their modules."""


def print_effect(effect: Effect, found: Survey, title: str, console: Console) -> None:
    """Print a line for each setting that decides something: what it frees, where, and what it means in the model."""
    deciding = [one for one in effect.settings if one.setting.decided or not one.setting.operators]
    rows = [(_freed(one), _where(one), *_what(one, found)) for one in deciding]
    width = max([len("frees"), *(len(freed) for freed, _, _, _ in rows)])
    place = max([len("layers"), *(len(where) for _, where, _, _ in rows)])
    console.print()
    console.print(Text(f"on {title}", style="bold"), soft_wrap=True)
    if rows:
        console.print(Text(f"  {'frees':>{width}}  {'layers':<{place}}  setting", style="bold"))
    for freed, where, setting, operators in rows:
        start = f"  {freed:>{width}}  {where:<{place}}  "
        room = max(console.width - len(start), 40)
        if not operators or len(setting) + 2 + len(operators) <= room:
            console.print(Text.assemble(start, setting, (f": {operators}" if operators else "", "dim")), soft_wrap=True)
            continue
        console.print(Text(f"{start}{setting}:"), soft_wrap=True)
        for line in textwrap.wrap(operators, room - 2, break_long_words=False):
            console.print(Text(f"{' ' * len(start)}  {line}", style="dim"), soft_wrap=True)
    console.print(Text(f"  {_total(effect)}"), soft_wrap=True)


def remarks(one: SettingEffect) -> Iterator[str]:
    """What a user should know of a setting that was carried out: which of its operators save nothing, and why."""
    setting = one.setting
    name = f"`{setting.setting}` ({setting.action})"
    if setting.action == "recompute" and setting.decided and one.freed <= 0:
        if one.idle:
            more = f", {format_bytes(-one.freed)} more than it holds" if one.freed else ""
            yield f"{name}: recomputing it saves nothing: its inputs would have to be held instead{more}"
        elif not one.kept:
            yield f"{name}: recomputing it saves nothing: {_hold(setting.decided)} nothing for backward"
    elif one.idle:
        yield f"{name}: recomputing {', '.join(one.idle)} saves nothing: the inputs would have to be held instead"
    if one.kept:
        yield (
            f"{name}: kept all the same, since the call cannot be replayed (an input is written to, or it makes"
            f" something of what other ranks sent): {', '.join(one.kept)}"
        )
    if setting.action.startswith("swap") and one.freed == 0 and (setting.decided or not setting.operators):
        yield f"{name}: swapping it frees nothing: {_hold(setting.decided)} nothing for backward"


def effect_as_json(effect: Effect) -> dict[str, Any]:
    """The same as plain JSON values."""
    return {
        "settings": [
            {
                "setting": one.setting.setting,
                "action": one.setting.action,
                "layers": list(one.setting.layers),
                "operators": list(one.setting.operators),
                "decided": list(one.setting.decided),
                "freed": one.freed,
                "idle": list(one.idle),
                "kept": list(one.kept),
            }
            for one in effect.settings
        ],
        "recomputed": effect.recomputed,
        "swapped": effect.swapped,
        "freed": effect.freed,
        "held": effect.held,
    }


def _freed(one: SettingEffect) -> str:
    if one.setting.action == "keep" or "collective" in one.setting.action:
        return "-"
    return format_bytes(one.freed) if one.freed > 0 else "nothing"


def _where(one: SettingEffect) -> str:
    layers = one.setting.layers
    text = format_layers(layers)
    return f"{len(layers)}: {text}" if len(text) <= 20 else f"{len(layers)}: {text[:17].rpartition(',')[0]},…"


def _what(one: SettingEffect, found: Survey) -> tuple[str, str]:
    """The setting, and the operators it means."""
    setting = one.setting
    kind = found.kinds[found.kind_of[setting.layers[0]]]
    tree = NameTree.of(operator.name for operator in kind.operators)

    def words(names: tuple[str, ...]) -> str:
        return shorten(names, tree) if len(names) > _MANY else ", ".join(names)

    plain = setting.setting == "the whole layer" or setting.operators == (setting.setting,)
    text = "" if plain else words(setting.operators)
    lost = tuple(name for name in setting.operators if name not in setting.decided)
    if lost:
        text += f"{', ' if text else ''}but not {words(lost)}, which another setting decides"
    return f"{setting.action} {setting.setting}", text


def _total(effect: Effect) -> str:
    parts = [
        f"{format_bytes(size)} by {name}"
        for name, size in (("recompute", effect.recomputed), ("swap", effect.swapped))
        if size
    ]
    share = f" ({effect.freed / effect.held:.0%})" if effect.held else ""
    total = format_bytes(max(effect.freed, 0))
    return f"frees {total} of the {format_bytes(effect.held)} held for backward{share}" + (
        f": {' and '.join(parts)}" if len(parts) > 1 else ""
    )


def _hold(names: tuple[str, ...]) -> str:
    few = ", ".join(names[:_MANY]) + (f" and {len(names) - _MANY} more" if len(names) > _MANY else "")
    return f"{few or 'it'} {'hold' if len(names) > 1 else 'holds'}"

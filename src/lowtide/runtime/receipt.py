"""What really happened: for each setting the operators it decided, the bytes that moved, and the seconds that took."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from lowtide.operators.effect import freed_by_recompute
from lowtide.operators.kinds import LayerKind
from lowtide.policy import Policy, Recompute, Resolution, Setting, format_layers
from lowtide.runtime.graph import GraphBytes
from lowtide.runtime.ledger import WHOLE, Ledger, Line
from lowtide.runtime.program import BOUNDARY
from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["OperatorReceipt", "Receipt", "SettingReceipt", "write_receipt"]


class OperatorReceipt(NamedTuple):
    """What became of one operator's tensors in one layer."""

    layer: int
    """-1 for the root."""
    operator: str
    swaps: int
    """How many tensors left."""
    recomputes: int
    """How many calls were replayed."""
    moved_bytes: int
    """The storages that left."""
    copied_bytes: int
    """The bytes that were copied; less than moved where only a view of a storage was saved."""
    freed_bytes: int
    """The device memory that was freed before backward."""
    handed_back_bytes: int
    """Still on the device when backward asked for it."""
    kept_bytes: int
    """Was to leave, and stayed."""
    copy_seconds: float
    """The link's time, both ways. Plain copies on the host are not timed."""
    stall_seconds: float
    """The computation's time spent waiting for a copy back."""
    recompute_seconds: float
    notes: tuple[str, ...]
    """What went otherwise than asked for, and how often."""


class SettingReceipt(NamedTuple):
    """What one setting did."""

    setting: str
    """The pattern, ``the whole layer`` or ``the layer's input``."""
    action: str
    """What it asked for."""
    layers: tuple[int, ...]
    """Empty for the root."""
    operators: tuple[str, ...]
    """The operators it decided."""
    freed_bytes: int | None
    """Freed between forward and backward, all its layers together; None where it is not known."""
    moved_bytes: int
    kept_bytes: int
    copy_seconds: float
    stall_seconds: float
    recompute_seconds: float
    notes: tuple[str, ...]
    """What went otherwise than asked for; that the setting had no effect, and why."""


class Receipt(NamedTuple):
    """What happened since the last receipt. Print it, or take ``as_json()``."""

    settings: tuple[SettingReceipt, ...]
    operators: tuple[OperatorReceipt, ...]
    without_effect: tuple[str, ...]
    """The settings that name nothing or lost to another, in words."""

    def as_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "settings": [one._asdict() | {"layers": list(one.layers)} for one in self.settings],
            "operators": [one._asdict() for one in self.operators],
            "without_effect": list(self.without_effect),
        }

    def __rich__(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False)
        for name in ("setting", "layers", "operators", "moved", "freed", "copy", "stall", "recompute", "remarks"):
            right = name in ("moved", "freed", "copy", "stall", "recompute")
            table.add_column(name, justify="right" if right else "left", no_wrap=right)
        for one in self.settings:
            table.add_row(
                Text(f"{one.setting}: {one.action}"),  # a pattern has brackets, which a string's markup would take
                format_layers(one.layers) or "root",
                Text(_few(one.operators)),
                format_bytes(one.moved_bytes) if one.moved_bytes else "",
                format_bytes(one.freed_bytes) if one.freed_bytes is not None else "?",
                *(format_seconds(seconds) if seconds else "" for seconds in one[7:10]),
                Text("; ".join(one.notes)),
            )
        for line in self.without_effect:
            table.add_row(Text(line))
        return table

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=160).print(self.__rich__())
        return text.getvalue()


def write_receipt(
    policy: Policy,
    resolution: Resolution | None,
    kinds: Mapping[int, LayerKind | None],
    ledger: Ledger,
    more: Iterable[str] = (),
    compiled: Mapping[int, GraphBytes] = MappingProxyType({}),
) -> Receipt:
    """Sum up what the ledger counted; ``kinds`` has the kind of each layer, and of the root, where it is known.

    ``compiled`` has what each compiled layer holds.
    """
    ledger.settle()
    lines = [line for line in ledger.lines.values() if _busy(line)]
    operators = tuple(_operator(line) for line in sorted(lines, key=lambda line: line.layer))
    settings = resolution.settings if resolution is not None else _whole_layers(policy)
    unused = [str(item) for item in resolution.unused] if resolution is not None else []
    return Receipt(
        tuple(_setting(setting, kinds, ledger, compiled) for setting in settings if setting.action != "keep"),
        operators,
        (*unused, *more),
    )


def _whole_layers(policy: Policy) -> tuple[Setting, ...]:
    """All there is to say before, or without, profiling any layer."""
    layers = tuple(index for index, settings in enumerate(policy.layers) if isinstance(settings.default, Recompute))
    return (Setting(WHOLE, "recompute", layers, (), ()),) if layers else ()


def _busy(line: Line) -> bool:
    return bool(line.swaps or line.recomputes or line.kept_bytes or line.notes)


def _operator(line: Line) -> OperatorReceipt:
    return OperatorReceipt(
        line.layer,
        line.operator,
        line.swaps,
        line.recomputes,
        line.moved_bytes,
        line.moved_bytes - line.spared_bytes,
        line.freed_bytes,
        line.handed_back_bytes,
        line.kept_bytes,
        line.copy_seconds,
        line.stall_seconds,
        line.recompute_seconds,
        _notes([line]),
    )


def _setting(
    setting: Setting, kinds: Mapping[int, LayerKind | None], ledger: Ledger, compiled: Mapping[int, GraphBytes]
) -> SettingReceipt:
    layers = setting.layers
    if setting.setting == WHOLE and setting.action == "recompute":
        named: tuple[str, ...] = (WHOLE, *setting.decided)
    else:
        named = setting.decided or ((BOUNDARY,) if not setting.operators else ())
    lines = [ledger.lines[key] for key in ((i, name) for i in layers for name in named) if key in ledger.lines]
    notes = list(_notes(lines))
    back = sum(line.handed_back_bytes for line in lines)
    if back:
        notes.append(f"{format_bytes(back)} still on the device when backward asked for it")
    freed: int | None = sum(line.freed_bytes for line in lines)
    kinds_there = [kind for index in layers if (kind := kinds.get(index)) is not None]
    known = len(kinds_there) == len(layers)
    recomputed = setting.action == "recompute"
    if recomputed:
        freed = sum(freed_by_recompute(kind, setting.decided) for kind in kinds_there) if known else None
    if known and setting.decided:
        if not any(one.owned for kind in kinds_there for one in kind.operators if one.name in setting.decided):
            notes.append("no effect: nothing of it is saved for backward")
        elif recomputed and freed is not None and freed <= 0:
            notes.append("no effect: what it is rebuilt from is as large as what it holds")
    if recomputed and layers and all(index in compiled for index in layers):
        whole = setting.setting == WHOLE
        freed = sum(compiled[index].freed(None if whole else setting.decided) for index in layers)
        notes.append("compiled")
        if not whole and not any(compiled[index].undecided.get(name) for index in layers for name in setting.decided):
            notes.append("no effect: the compiler saves nothing of it")
        elif not freed:
            notes.append("no effect: torch cannot repeat it in a compiled graph on this device")
    return SettingReceipt(
        setting.setting,
        setting.action,
        setting.layers,
        setting.decided,
        freed,
        sum(line.moved_bytes for line in lines),
        sum(line.kept_bytes for line in lines),
        sum(line.copy_seconds for line in lines),
        sum(line.stall_seconds for line in lines),
        sum(line.recompute_seconds for line in lines),
        tuple(notes),
    )


def _notes(lines: Iterable[Line]) -> tuple[str, ...]:
    counts: dict[str, int] = {}
    for line in lines:
        for what, count in line.notes.items():
            counts[what] = counts.get(what, 0) + count
    return tuple(f"{what} ({count} x)" for what, count in counts.items())


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

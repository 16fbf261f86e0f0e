"""The entries of ``swap_config``: which layers and operators are swapped, and how early they return."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from lowtide.config.document import Path
from lowtide.config.layer_counts import indices_of
from lowtide.config.pattern_text import is_pattern
from lowtide.config.problem import Problems, nearest
from lowtide.policy import Swap
from lowtide.policy.decision import MAX_PREFETCH

__all__ = ["DEFAULT_PATTERN", "SwapEntry", "SwapSettings", "read_prefetch", "read_swap", "read_tier"]

DEFAULT_PATTERN = ".*\\.flash_attention"
"""What is swapped when swap is on and nothing is named."""


class SwapEntry(NamedTuple):
    """One entry: some layers, and how their tensors are swapped."""

    layers: list[int] | Literal[True]
    """The layers' indices, or True for all."""
    prefetch: int
    """How many operators before its use the reload of a tensor starts."""
    tier: Literal["host", "disk"] = "host"
    """Where the bytes go."""

    @property
    def decision(self) -> Swap:
        """The entry as a decision of the Policy."""
        return Swap(self.prefetch, self.tier)

    def has(self, layer: int) -> bool:
        """Whether the entry means ``layer``."""
        return self.layers is True or layer in self.layers

    def as_json(self) -> dict[str, Any]:
        """The entry with the keys of the recorded vectors; the tier only where it is not the host."""
        value: dict[str, Any] = {"backward_prefetch": self.prefetch, "layers": self.layers}
        return value if self.tier == "host" else {**value, "tier": self.tier}


class SwapSettings(NamedTuple):
    """``swap_config``, normalised."""

    swap: bool = False
    """Whether anything is swapped at all."""
    layer_swap: tuple[SwapEntry, ...] = ()
    """Whole layers; the first entry that has a layer wins."""
    op_swap: tuple[tuple[str, tuple[SwapEntry, ...]], ...] = ()
    """Operators by pattern, in order of first appearance."""
    default: bool = False
    """Whether ``op_swap`` is the built-in default."""


def read_swap(section: object, num_layers: int, problems: Problems, path: Path = ("swap_config",)) -> SwapSettings:
    """Normalise ``swap_config``; it is validated even when ``swap`` is false."""
    if not isinstance(section, dict):
        return SwapSettings()  # absent, or the schema reports it; unknown keys too
    swap = section.get("swap", False)
    if not isinstance(swap, bool):
        problems.error((*path, "swap"), f"`swap` must be true or false; found {swap!r:.60}", "write swap: true")
        swap = False
    default_prefetch = read_prefetch(section.get("default_prefetch", 1), problems, (*path, "default_prefetch"))
    layer_swap = _entries(section.get("layer_swap"), "layer_swap", problems, path)
    op_swap = _entries(section.get("op_swap"), "op_swap", problems, path)
    if layer_swap is None and op_swap is None and default_prefetch is not None:
        everywhere = SwapEntry(True, default_prefetch)
        return SwapSettings(swap, (), ((DEFAULT_PATTERN, (everywhere,)),), default=True)
    if default_prefetch is not None and "default_prefetch" in section:
        problems.warn(
            (*path, "default_prefetch"),
            "default_prefetch has no effect: it belongs to the default policy, which layer_swap or op_swap replaces",
            "set backward_prefetch in each entry",
        )
    if not swap and (layer_swap or op_swap):
        problems.warn((*path, "swap"), "swap is false: layer_swap and op_swap have no effect", "write swap: true")

    layers = [_read_entry(entry, here, num_layers, problems, ()) for entry, here in layer_swap or ()]
    groups: dict[str, list[tuple[SwapEntry, Path]]] = {}
    for entry, here in op_swap or ():
        names = _operator_names(entry, here, problems)
        read = _read_entry(entry, here, num_layers, problems, ("op_name",))
        if read is not None:
            for name in names:
                groups.setdefault(name, []).append((read, here))
    layer_group = [(read, here) for read, (_, here) in zip(layers, layer_swap or (), strict=True) if read is not None]
    return SwapSettings(
        swap,
        _collapse(layer_group, problems, "layer_swap"),
        tuple((name, _collapse(group, problems, f"op_swap of {name}")) for name, group in groups.items()),
    )


def read_prefetch(value: object, problems: Problems, path: Path, *, largest: int = MAX_PREFETCH) -> int | None:
    """A prefetch distance: a whole number from one."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
        problems.error(
            path, f"`{path[-1]}` must be a whole number from 1 to {largest:,}; found {value!r:.60}", "for example 10"
        )
        return None
    return value


def read_tier(entry: dict[str, Any], problems: Problems, path: Path) -> Literal["host", "disk"]:
    """Where an entry's bytes go: host memory unless it says disk."""
    tier = entry.get("tier", "host")
    if tier not in ("host", "disk"):
        problems.error((*path, "tier"), f"`tier` must be host or disk; found {tier!r:.60}", "write tier: host")
    return "disk" if tier == "disk" else "host"


def _entries(value: object, key: str, problems: Problems, path: Path) -> list[tuple[dict[str, Any], Path]] | None:
    """The entries of one key with their places; None if the key is absent or null."""
    here: Path = (*path, key)
    if value is None:
        return None
    if isinstance(value, dict):
        return [(value, here)]
    if not isinstance(value, (list, tuple)):
        problems.error(here, f"`{key}` must be a list of entries; found {value!r:.60}", _example(key))
        return []
    result: list[tuple[dict[str, Any], Path]] = []
    for index, entry in enumerate(value):
        if isinstance(entry, dict):
            result.append((entry, (*here, index)))
        else:
            problems.error((*here, index), f"an entry of `{key}` is a mapping; found {entry!r:.60}", _example(key))
    return result


def _example(key: str) -> str:
    name = "  op_name: attention\n    " if key == "op_swap" else "  "
    return f"write:\n{key}:\n  -{name[1:]}backward_prefetch: 20\n    layers: [0, 1]"


def _operator_names(entry: dict[str, Any], here: Path, problems: Problems) -> list[str]:
    if "op_name" not in entry:
        problems.error(here, "this entry has no `op_name`", "write op_name: attention")
        return []
    names = entry["op_name"]
    listed = names if isinstance(names, (list, tuple)) else [names]
    if not listed or not all(isinstance(name, str) and name for name in listed):
        problems.error(
            (*here, "op_name"),
            f"`op_name` must be a name or a list of names; found {names!r:.60}",
            "op_name: attention",
        )
        return []
    path: Path = (*here, "op_name")
    return [name for name in listed if is_pattern(name, path, problems, key=False)]


def _read_entry(
    entry: dict[str, Any], here: Path, num_layers: int, problems: Problems, more: tuple[str, ...]
) -> SwapEntry | None:
    known = ("backward_prefetch", "layers", "tier", *more)
    for key in entry:
        if key not in known:
            near = nearest(key, known)
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
            problems.error((*here, key), f"a swap entry has no key {key!r}", hint, key=True)
    for key in ("backward_prefetch", "layers"):
        if key not in entry:
            example = "20" if key == "backward_prefetch" else "[0, 1]"
            problems.error(here, f"this entry has no `{key}`", f"write {key}: {example}")
    if "backward_prefetch" not in entry or "layers" not in entry:
        return None
    prefetch = read_prefetch(entry["backward_prefetch"], problems, (*here, "backward_prefetch"))
    layers = indices_of(entry["layers"], num_layers, problems, (*here, "layers"))
    tier = read_tier(entry, problems, here)
    if prefetch is None or layers is None:
        return None
    return SwapEntry(True if isinstance(layers, bool) else layers, prefetch, tier)


def _collapse(group: list[tuple[SwapEntry, Path]], problems: Problems, what: str) -> tuple[SwapEntry, ...]:
    """If any entry means all layers, the group is one entry; the others must agree with it."""
    entries = [entry for entry, _ in group]
    if not any(entry.layers is True for entry in entries):
        return tuple(entries)
    first = entries[0]
    for entry, here in group:
        if entry.prefetch != first.prefetch or entry.tier != first.tier:
            problems.error(
                here,
                f"one entry of {what} means all layers, and this one asks for another prefetch or tier:"
                " Inconsistent 'backward_prefetch' values."
                if entry.prefetch != first.prefetch
                else f"one entry of {what} means all layers, and this one asks for another tier",
                "give each layer one entry, or all entries the same values",
            )
            return ()
    return (SwapEntry(True, first.prefetch, first.tier),)

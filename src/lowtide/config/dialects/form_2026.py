"""The form of 2026: top-level ``recompute``, ``recompute_comm`` and ``swap``, by layer ranges.

Patterns here are one regular expression over the whole dotted path, and a prefetch counts layers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from lowtide.config.document import Path
from lowtide.config.pattern_text import is_pattern
from lowtide.config.placement import Placement
from lowtide.config.problem import Problems, nearest
from lowtide.config.swap_entries import read_prefetch, read_tier
from lowtide.policy import (
    CollectiveRule,
    Keep,
    LayerPolicy,
    Pattern,
    Policy,
    Recompute,
    Rule,
    Swap,
)

__all__ = ["Form2026", "layer_specs", "path_pattern", "read_2026"]

_MODES: dict[str, Literal["None", "full", "select"]] = {"None": "None", "full": "full", "select": "select"}
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Form2026:
    """A file of the 2026 form, normalised: every setting with the layers it is on in."""

    placement: Placement | None
    """The stage and chunk of each layer; None where the file does not say."""
    num_layers: int
    """All layers, those of multi-token prediction included."""
    mode: Literal["None", "full", "select"] = "None"
    """What is recomputed."""
    full: tuple[int, ...] = ()
    """The fully recomputed layers."""
    select: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Patterns of recomputed modules and operators."""
    exclude: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Patterns of operators and modules that are never recomputed."""
    comm: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Patterns of operators whose collective is re-issued."""
    prefetch: int = 1
    """How many layers before its use the reload of a tensor starts."""
    layer_swap: dict[int, Swap] = field(default_factory=dict)
    """The swapped layers."""
    op_swap: dict[str, tuple[tuple[int, ...], Swap]] = field(default_factory=dict)
    """Patterns of swapped operators."""

    def normalized(self) -> dict[str, Any]:
        """The form as plain JSON values; ``full_layers`` lists every wrapped layer, swapped ones too."""
        return {
            **(self.placement.normalized() if self.placement else {}),
            "full_layers": sorted({*self.full, *self.layer_swap}),
            "select_recompute": {name: list(layers) for name, layers in self.select.items()},
            "select_comm_recompute": {name: list(layers) for name, layers in self.comm.items()},
            "select_recompute_exclude": {name: list(layers) for name, layers in self.exclude.items()},
            "layer_swap": sorted(self.layer_swap),
            "op_swap": {name: list(layers) for name, (layers, _) in self.op_swap.items()},
        }

    def policy(self) -> Policy:
        """The Policy the file asks for."""
        shared: dict[LayerPolicy, LayerPolicy] = {}
        layers = [self._layer(index) for index in range(self.num_layers)]
        return Policy(tuple(shared.setdefault(layer, layer) for layer in layers), origin="file")

    def _layer(self, index: int) -> LayerPolicy:
        full, swap = index in self.full, self.layer_swap.get(index)
        rules = [Rule(path_pattern(name), Keep()) for name in _on(self.exclude, index) if self.mode != "None"]
        # Settings that a whole layer overrules stay in, so that resolving can say that they did nothing.
        rules += [Rule(path_pattern(name), Recompute()) for name in _on(self.select, index)]
        if swap is None:
            rules += [
                Rule(path_pattern(name), entry) for name, (layers, entry) in self.op_swap.items() if index in layers
            ]
        collectives = [CollectiveRule(path_pattern(name)) for name in _on(self.comm, index)]
        default = Recompute() if full else swap or Keep()
        # A layer that is both recomputed and swapped has only its input left to swap.
        return LayerPolicy(default, tuple(rules), boundary=swap or Keep(), collectives=tuple(collectives))


def read_2026(
    recompute: object,
    recompute_comm: object,
    swap: object,
    num_layers: int,
    problems: Problems,
    *,
    placement: Placement | None = None,
) -> Form2026:
    """Normalise the three sections; what is wrong with them is reported in ``problems``."""
    reader = _Reader(num_layers, problems)
    mode, full, select, exclude = reader.recompute(recompute if isinstance(recompute, dict) else {})
    comm = reader.comm(recompute_comm if isinstance(recompute_comm, dict) else {})
    prefetch, layer_swap, op_swap = reader.swap(swap if isinstance(swap, dict) else {})
    return Form2026(placement, num_layers, mode, full, select, exclude, comm, prefetch, layer_swap, op_swap)


def layer_specs(value: object, num_layers: int, problems: Problems, path: Path) -> tuple[int, ...] | None:
    """Read ``["0-3", "5"]``: strictly ascending, not overlapping, every layer below ``num_layers``.

    >>> layer_specs(["0-2", 5], 8, Problems(), ())
    (0, 1, 2, 5)
    """
    hint = "write a list of layers and ranges, such as ['0-3', '5']"
    if not isinstance(value, list):
        problems.error(path, f"layers are written as a list; found {value!r:.60}", hint)
        return None
    layers: list[int] = []
    for index, spec in enumerate(value):
        here: Path = (*path, index)
        is_text = isinstance(spec, str) or (isinstance(spec, int) and not isinstance(spec, bool))
        match = _RANGE.fullmatch(str(spec).strip()) if is_text else None
        if match is None:
            problems.error(here, f"{spec!r:.60} is neither a layer nor a range of layers", hint)
            return None
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            problems.error(here, f"the range {spec!r} runs backwards", f"write '{last}-{first}'")
            return None
        if last >= num_layers:
            problems.error(here, f"there is no layer {last}", f"layers run from 0 to {num_layers - 1}")
            return None
        if layers and first <= layers[-1]:
            problems.error(here, f"{spec!r} starts at {first}, but the one before ends at {layers[-1]}", "sort them")
            return None
        layers += range(first, last + 1)
    return tuple(layers)


class _Reader:
    """Reads the three sections against a number of layers."""

    def __init__(self, num_layers: int, problems: Problems) -> None:
        self.num_layers, self.problems = num_layers, problems

    def recompute(
        self, section: dict[str, Any]
    ) -> tuple[
        Literal["None", "full", "select"], tuple[int, ...], dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]
    ]:
        path: Path = ("recompute",)
        mode = _MODES.get(section.get("mode") or "None") if isinstance(section.get("mode"), str | None) else None
        if mode is None:
            found = section["mode"]
            hint = "write mode: None" if str(found).lower() == "none" else "write mode: full, or mode: select"
            self.problems.error(
                (*path, "mode"), f'`mode` must be "None", "full" or "select"; found {found!r:.60}', hint
            )
            return "None", (), {}, {}
        needed = {"full": "full_recompute_layer", "select": "select_module"}.get(mode)
        if needed is not None and not section.get(needed):
            self.problems.error(
                (*path, "mode"), f"mode is {mode!r}, but {needed} is missing or empty", f"write {needed}"
            )
        full: tuple[int, ...] = ()
        if section.get("full_recompute_layer") is not None:
            full = self.specs(section["full_recompute_layer"], (*path, "full_recompute_layer"))
        select = self.patterns(section.get("select_module"), (*path, "select_module"))
        exclude = self.patterns(section.get("exclude_op"), (*path, "exclude_op"))
        for key, useless in (
            ("full_recompute_layer", mode == "None" and full),
            ("select_module", mode != "select" and select),
        ):
            if useless:
                self.problems.warn((*path, key), f"{key} has no effect: mode is {mode!r}", "write mode: select")
        if mode == "None":
            full, select = (), {}
        return mode, full, select if mode == "select" else {}, exclude

    def comm(self, section: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        path: Path = ("recompute_comm",)
        enabled = self.switch(section, path)
        patterns = self.patterns(section.get("select_module"), (*path, "select_module"))
        if enabled and not section.get("select_module"):
            self.problems.error(
                (*path, "enable"), "enable is true, but select_module is missing or empty", "name operators"
            )
        if patterns and not enabled:
            self.problems.warn(
                (*path, "select_module"), "select_module has no effect: enable is not true", "enable: true"
            )
        return patterns if enabled else {}

    def swap(self, section: dict[str, Any]) -> tuple[int, dict[int, Swap], dict[str, tuple[tuple[int, ...], Swap]]]:
        path: Path = ("swap",)
        enabled = self.switch(section, path)
        prefetch = 1
        if "default_prefetch" in section:
            largest = max(self.num_layers - 1, 1)
            prefetch = (
                read_prefetch(section["default_prefetch"], self.problems, (*path, "default_prefetch"), largest=largest)
                or 1
            )
        layer_swap: dict[int, Swap] = {}
        for entry, here in self.entries(section.get("layer_swap"), (*path, "layer_swap"), ("layers",)):
            layers = self.specs(entry["layers"], (*here, "layers"))
            decision = Swap(prefetch, read_tier(entry, self.problems, here), "layers")
            self.room(layers, prefetch, (*here, "layers"))
            for layer in layers:
                layer_swap.setdefault(layer, decision)
        op_swap: dict[str, tuple[tuple[int, ...], Swap]] = {}
        for entry, here in self.entries(section.get("op_swap"), (*path, "op_swap"), ("op_name", "layers")):
            layers = self.specs(entry["layers"], (*here, "layers"))
            decision = Swap(prefetch, read_tier(entry, self.problems, here), "layers")
            self.room(layers, prefetch, (*here, "layers"))
            if is_pattern(entry["op_name"], (*here, "op_name"), self.problems, "path", key=False):
                if entry["op_name"] in op_swap:
                    self.problems.warn(
                        (*here, "op_name"), f"{entry['op_name']!r} is in an earlier entry too; only the last one counts"
                    )
                op_swap[entry["op_name"]] = (layers, decision)
        if not enabled:
            if layer_swap or op_swap:
                self.problems.warn((*path, "enable"), "swap entries have no effect: enable is not true", "enable: true")
            return prefetch, {}, {}
        return prefetch, layer_swap, op_swap

    def room(self, layers: tuple[int, ...], prefetch: int, path: Path) -> None:
        """A prefetch needs that many layers behind the swapped one; the last layer has none and needs none."""
        inner = [layer for layer in layers if layer < self.num_layers - 1]
        if inner and inner[-1] + prefetch >= self.num_layers:
            self.problems.error(
                path,
                f"layer {inner[-1]} has only {self.num_layers - 1 - inner[-1]} layers behind it;"
                f" default_prefetch is {prefetch}",
                f"swap layers up to {self.num_layers - 1 - prefetch}, or lower default_prefetch",
            )

    def entries(self, value: object, path: Path, required: tuple[str, ...]) -> list[tuple[dict[str, Any], Path]]:
        if value is None:
            return []
        if not isinstance(value, list):
            self.problems.error(
                path, f"`{path[-1]}` must be a list of entries; found {value!r:.60}", "- layers: ['0-3']"
            )
            return []
        result: list[tuple[dict[str, Any], Path]] = []
        for index, entry in enumerate(value):
            here: Path = (*path, index)
            if not isinstance(entry, dict):
                self.problems.error(here, f"an entry is a mapping; found {entry!r:.60}", "- layers: ['0-3']")
                continue
            self.known(entry, (*required, "tier"), here)
            missing = [key for key in required if key not in entry]
            for key in missing:
                self.problems.error(here, f"this entry has no `{key}`", f"each entry needs {' and '.join(required)}")
            if not missing:
                result.append((entry, here))
        return result

    def patterns(self, value: object, path: Path) -> dict[str, tuple[int, ...]]:
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.problems.error(
                path, f"`{path[-1]}` maps patterns to layers; found {value!r:.60}", "write mlp: ['0-3']"
            )
            return {}
        return {
            name: self.specs(layers, (*path, name))
            for name, layers in value.items()
            if is_pattern(name, (*path, name), self.problems, "path")
        }

    def specs(self, value: object, path: Path) -> tuple[int, ...]:
        return layer_specs(value, self.num_layers, self.problems, path) or ()

    def switch(self, section: dict[str, Any], path: Path) -> bool:
        value = section.get("enable", False)
        if not isinstance(value, bool):
            self.problems.error(
                (*path, "enable"), f"`enable` must be true or false; found {value!r:.60}", "enable: true"
            )
        return value is True

    def known(self, section: dict[str, Any], keys: tuple[str, ...], path: Path) -> None:
        for key in section:
            if key not in keys:
                near = nearest(key, keys)
                hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(keys)}"
                self.problems.error((*path, key), f"there is no key {key!r} here", hint, key=True)


def path_pattern(name: str) -> Pattern:
    """The pattern as this form reads it: one expression over the whole path."""
    return Pattern(name, "path")


def _on(patterns: dict[str, tuple[int, ...]], index: int) -> list[str]:
    return [name for name, layers in patterns.items() if index in layers]

"""The graph form: ``recompute_config`` and ``swap_config``, normalised and turned into a Policy.

The normal form is the one the MindSpore Transformers guide prints: for each setting a table of
layer counts, or, while swap is on, a list of layer indices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from lowtide.config.document import Path
from lowtide.config.layer_counts import counts_of, indices_of
from lowtide.config.pattern_text import is_pattern
from lowtide.config.placement import Placement, Table
from lowtide.config.problem import Problems
from lowtide.config.swap_entries import SwapSettings
from lowtide.policy import CollectiveRule, Communication, Decision, Keep, LayerPolicy, Pattern, Policy, Recompute, Rule
from lowtide.policy.policy import YAML_KEYS

__all__ = ["GraphForm", "Selection", "read_graph"]

Selection: TypeAlias = Table | list[int] | Literal[True]
"""Which layers a setting is on in: counts by mini-stage or, with swap on, indices or True for all."""

DEFAULT_SELECT = {
    True: ("feed_forward\\.mul", "feed_forward\\.w1\\.activation\\.silu"),
    False: (
        "mlp\\.shared_experts\\.mul",
        "mlp\\.shared_experts\\.activation_func\\.silu",
        "mlp\\.mul",
        "mlp\\.activation_func\\.silu",
    ),
}
"""What ``select_recompute`` means where it names no operator, for legacy names and for mcore names."""
DEFAULT_COMM = (".*\\.norm",)
"""What ``select_comm_recompute`` means where it names no operator."""

_SELECTIONS = (
    "select_recompute",
    "select_comm_recompute",
    "select_recompute_exclude",
    "select_comm_recompute_exclude",
)
SWITCHES = {key: setting for setting, key in YAML_KEYS.items()}
"""The settings of Communication, by their YAML keys."""


@dataclass(frozen=True, eq=False)
class GraphForm:
    """A file of the graph form, normalised."""

    placement: Placement
    """The stage and chunk of each layer."""
    swap: SwapSettings
    """``swap_config``."""
    layer_recompute: Selection
    """The fully recomputed layers."""
    select_recompute: dict[str, Selection]
    """Patterns of recomputed operators."""
    select_comm_recompute: dict[str, Selection]
    """Patterns of operators whose collective is re-issued."""
    select_recompute_exclude: dict[str, Selection]
    """Patterns of operators that are never recomputed."""
    select_comm_recompute_exclude: dict[str, Selection]
    """Patterns of operators whose collective is never re-issued."""
    builtin: frozenset[str] = frozenset()
    """The settings among these whose patterns are the grammar's defaults."""
    written_select: dict[str, Selection] = field(default_factory=dict)
    """``select_recompute`` where it is a mapping, before any exclude removed a pattern."""
    removed: tuple[tuple[str, str], ...] = ()
    """(setting, pattern) pairs that an exclude removed."""
    switches: dict[str, bool] = field(default_factory=dict)
    """mp_comm_recompute and its like, where the file sets them."""
    prediction_layers: int = 0
    """Multi-token-prediction layers; each takes the decision of the last layer."""

    def is_on(self, selection: Selection, layer: int) -> bool:
        """Whether ``selection`` has ``layer``."""
        if selection is True:
            return True
        if selection and isinstance(selection[0], list):
            return self.placement.within(selection, layer)
        return layer in selection

    def normalized(self) -> dict[str, Any]:
        """The form with the keys of the recorded vectors."""
        value = {**self.placement.normalized(), "layer_recompute": self.layer_recompute}
        value.update({key: getattr(self, key) for key in _SELECTIONS})
        if self.swap.swap:
            value["layer_swap"] = [entry.as_json() for entry in self.swap.layer_swap]
            value["op_swap"] = {name: [entry.as_json() for entry in entries] for name, entries in self.swap.op_swap}
        return value

    def policy(self) -> Policy:
        """The Policy the file asks for."""
        shared: dict[LayerPolicy, LayerPolicy] = {}  # equal layers share one object, so they resolve once
        layers = [self._layer(index) for index in range(self.placement.num_layers)]
        layers = [shared.setdefault(layer, layer) for layer in layers]
        layers += layers[-1:] * self.prediction_layers
        return Policy(
            tuple(layers),
            origin="file",
            communication=Communication(**{SWITCHES[key]: value for key, value in self.switches.items()}),
        )

    def _layer(self, index: int) -> LayerPolicy:
        # Settings that a full recompute overrules stay in, so that resolving can say that they did nothing.
        rules = self._rules("select_recompute", index, Recompute())
        collectives = self._collective_rules("select_comm_recompute", index, reissue=True)
        full = Recompute() if self.is_on(self.layer_recompute, index) else None
        if not self.swap.swap:
            rules += self._rules("select_recompute_exclude", index, Keep())
            collectives += self._collective_rules("select_comm_recompute_exclude", index, reissue=False)
            return LayerPolicy(full or Keep(), tuple(rules), collectives=tuple(collectives))
        for name, entries in self.swap.op_swap:
            entry = next((entry for entry in entries if entry.has(index)), None)
            if entry is not None:
                rules.append(Rule(Pattern(name), entry.decision, builtin=self.swap.default))
        swap = next((entry.decision for entry in self.swap.layer_swap if entry.has(index)), None)
        boundary = swap if swap and not full else Keep()
        return LayerPolicy(full or swap or Keep(), tuple(rules), boundary, tuple(collectives))

    def _rules(self, key: str, index: int, decision: Decision) -> list[Rule]:
        exclude = isinstance(decision, Keep)
        return [Rule(Pattern(name), decision, key in self.builtin, exclude) for name in self.names_on(key, index)]

    def _collective_rules(self, key: str, index: int, *, reissue: bool) -> list[CollectiveRule]:
        return [CollectiveRule(Pattern(name), reissue, key in self.builtin) for name in self.names_on(key, index)]

    def names_on(self, key: str, index: int) -> list[str]:
        """The patterns of the setting ``key`` that are on in layer ``index``."""
        selections: dict[str, Selection] = getattr(self, key)
        return [name for name, selection in selections.items() if self.is_on(selection, index)]


def read_graph(
    section: object,
    swap: SwapSettings,
    placement: Placement,
    problems: Problems,
    *,
    use_legacy: bool = True,
    prediction_layers: int = 0,
    path: Path = ("recompute_config",),
) -> GraphForm:
    """Normalise ``recompute_config``; what is wrong with it is reported in ``problems``."""
    section = section if isinstance(section, dict) else {}  # the schema reports anything else, and unknown keys
    switches = {key: section[key] for key in SWITCHES if key in section}
    for key, value in switches.items():
        if not isinstance(value, bool):
            problems.error((*path, key), f"`{key}` must be true or false; found {value!r:.60}", f"write {key}: true")
    reader = _Reader(section, swap.swap, placement, problems, path)
    layer_recompute = reader.selection(section.get("recompute", False), (*path, "recompute"))
    recompute = section.get("recompute")
    if isinstance(recompute, (list, tuple)) and recompute and all(isinstance(entry, str) for entry in recompute):
        problems.warn((*path, "recompute"), "recompute takes no operator names: every layer is recomputed", _TO_SELECT)
    selections = {
        "select_recompute": reader.selections("select_recompute", DEFAULT_SELECT[use_legacy]),
        "select_comm_recompute": reader.selections("select_comm_recompute", DEFAULT_COMM),
        "select_recompute_exclude": reader.selections("select_recompute_exclude", ()),
        "select_comm_recompute_exclude": reader.selections("select_comm_recompute_exclude", ()),
    }
    written = dict(selections["select_recompute"]) if isinstance(section.get("select_recompute"), dict) else {}
    removed: list[tuple[str, str]] = []
    for key in ("select_recompute", "select_comm_recompute"):
        for exclude in selections[f"{key}_exclude"]:
            name = next((name for name in selections[key] if Pattern(exclude).covers(Pattern(name))), None)
            if name is not None:
                del selections[key][name]
                removed.append((key, name))
    return GraphForm(
        placement,
        swap,
        layer_recompute if layer_recompute is not None else [],
        **selections,
        builtin=frozenset(reader.builtin),
        written_select=written,
        removed=tuple(removed),
        switches={key: value for key, value in switches.items() if isinstance(value, bool)},
        prediction_layers=prediction_layers,
    )


_TO_SELECT = "to choose operators, write select_recompute"


class _Reader:
    """Reads the selections of one section."""

    def __init__(
        self, section: dict[str, Any], swap: bool, placement: Placement, problems: Problems, path: Path
    ) -> None:
        self.section, self.swap, self.placement = section, swap, placement
        self.problems, self.path = problems, path
        self.builtin: set[str] = set()

    def selection(self, value: object, path: Path, *, by_stage: bool = False) -> Selection | None:
        if self.swap and not by_stage:
            indices = indices_of(value, self.placement.num_layers, self.problems, path)
            return True if indices is True else indices or ([] if indices is not None else None)
        return counts_of(value, self.placement, self.problems, path)

    def selections(self, key: str, defaults: tuple[str, ...]) -> dict[str, Selection]:
        """``{pattern: layers}`` of one setting, in the file's order."""
        here: Path = (*self.path, key)
        value = self.section.get(key, False if defaults else {})
        exclude = not defaults  # excludes keep their tables while swap is on
        if isinstance(value, dict):
            entries = [(name, item, (*here, name)) for name, item in value.items()]
        elif isinstance(value, (list, tuple)) and not value:
            entries = []
        elif (
            isinstance(value, (list, tuple))
            and all(isinstance(item, str) for item in value)
            and (exclude or not self.swap)
        ):
            entries = [(item, True, (*here, index)) for index, item in enumerate(value)]
        else:
            return self._defaults(key, value, defaults, here)
        result: dict[str, Selection] = {}
        for name, item, place in entries:
            if is_pattern(name, place, self.problems, key=isinstance(value, dict)):
                selection = self.selection(item, place, by_stage=exclude)
                if selection is not None:
                    result[name] = selection
        return result

    def _defaults(self, key: str, value: object, defaults: tuple[str, ...], here: Path) -> dict[str, Selection]:
        self.builtin.add(key)
        selection = self.selection(value, here, by_stage=not defaults)
        if selection is None:
            return {}
        if not defaults and value is not False:
            self.problems.warn(
                here, f"`{key}` has no effect: it names no operator", f"write {key}: ['feed_forward\\.mul']"
            )
        return dict.fromkeys(defaults, selection)

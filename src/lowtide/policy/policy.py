"""The Policy: for every layer and operator, what becomes of its activations. Plain data."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from lowtide.errors import PolicyError
from lowtide.policy.decision import Decision, Keep, Recompute, Swap, decision_as_json, decision_from_json
from lowtide.policy.pattern import Pattern

__all__ = ["CommRule", "LayerPolicy", "Policy", "Rule", "format_layers", "parse_layers"]

FORMAT = 1
MAX_LAYERS = 100_000
KEEP = Keep()


@dataclass(frozen=True, slots=True)
class Rule:
    """Operators that match ``pattern`` get ``decision``."""

    pattern: Pattern
    """Which operators."""
    decision: Decision
    """``Keep`` excludes them from everything else; ``Recompute`` wins over ``Swap``."""
    builtin: bool = False
    """Whether it is a default of the grammar rather than written by a person: a built-in pattern
    that matches nothing is no mistake as long as one of its siblings does."""
    operators_only: bool = False
    """Whether a match on a module counts for nothing, as the grammar has it for excludes."""


@dataclass(frozen=True, slots=True)
class CommRule:
    """Whether the collective at the operators that match ``pattern`` is issued again in backward."""

    pattern: Pattern
    """Which operators; a module has no collective of its own, so a match on one has no effect."""
    repeat: bool = True
    """True drops the collective's result and repeats it; False keeps the result, and wins."""
    builtin: bool = False
    """As in :class:`Rule`."""


@dataclass(frozen=True, slots=True)
class LayerPolicy:
    """The decisions for one layer."""

    default: Decision = KEEP
    """What becomes of an operator that no rule names. ``Recompute`` repeats the whole layer."""
    rules: tuple[Rule, ...] = ()
    """Decisions by operator pattern."""
    boundary: Keep | Swap = KEEP
    """What becomes of the layer's input, the last value of the layer before it."""
    communication: tuple[CommRule, ...] = ()
    """Which collectives are issued again in backward."""

    def __post_init__(self) -> None:
        if not isinstance(self.boundary, (Keep, Swap)):
            raise PolicyError(f"a layer's input can be kept or swapped; found {self.boundary}")

    @property
    def recomputed_as_a_whole(self) -> bool:
        """Whether all of the layer is recomputed; an operator that is kept makes it a matter of single operators."""
        return isinstance(self.default, Recompute) and not any(isinstance(rule.decision, Keep) for rule in self.rules)

    def __str__(self) -> str:
        parts = [str(self.default)]
        parts += [f"{rule.pattern}: {rule.decision}" for rule in self.rules]
        parts += [f"{rule.pattern}: {'repeat' if rule.repeat else 'keep'} collective" for rule in self.communication]
        if self.boundary != Keep():
            parts.append(f"input: {self.boundary}")
        return ", ".join(parts)


@dataclass(frozen=True, repr=False)
class Policy:
    """What becomes of every activation of a model.

    A person's YAML and the solver both end in a Policy, and the runtime knows nothing else.

    >>> policy = Policy(layers=(LayerPolicy(default=Recompute()),) * 4)
    >>> policy
    Policy(4 layers, bec484eb: 0-3: recompute)
    >>> Policy.from_json(policy.to_json()) == policy
    True
    """

    layers: tuple[LayerPolicy, ...]
    """One for each layer, in the model's order; multi-token-prediction layers come last."""
    root: LayerPolicy = LayerPolicy()
    """Everything outside the layers: embedding, final norm, head and loss."""
    origin: Literal["file", "solver"] = "file"
    """Who decided. In a Policy from a file, a swapped operator that directly feeds a recomputed
    one is not swapped, as the guides say; a solver may mean exactly that."""
    fingerprint: str | None = None
    """The model it was made for, or None if for none in particular."""
    mp_comm_recompute: bool = True
    """Inside recomputed regions: repeat the tensor-parallel collectives, or keep their results."""
    parallel_optimizer_comm_recompute: bool = False
    """Gather sharded parameters again in backward, or keep them gathered."""
    recompute_slice_activation: bool = False
    """Of a recomputed layer's input keep only this tensor-parallel rank's slice."""

    @cached_property
    def digest(self) -> str:
        """A stable name of the content: equal Policies have equal digests, on every machine."""
        canonical = json.dumps(self.as_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def __repr__(self) -> str:
        groups = "; ".join(f"{format_layers(indices)}: {layer}" for layer, indices in _grouped(self.layers))
        root = f"; root: {self.root}" if self.root != LayerPolicy() else ""
        return f"Policy({len(self.layers)} layers, {self.digest[:8]}: {groups}{root})"

    def to_json(self) -> str:
        """The Policy as readable JSON text."""
        return json.dumps(self.as_json(), indent=1, ensure_ascii=False) + "\n"

    def as_json(self) -> dict[str, Any]:
        """The Policy as plain JSON values; equal layers share one entry."""
        value: dict[str, Any] = {
            "lowtide_policy": FORMAT,
            "origin": self.origin,
            "fingerprint": self.fingerprint,
            **{name: getattr(self, name) for name in _SWITCHES},
            "root": _layer_as_json(self.root),
            "layers": [
                {"layers": format_layers(indices), **_layer_as_json(layer)} for layer, indices in _grouped(self.layers)
            ],
        }
        return value

    @staticmethod
    def from_json(source: str | dict[str, Any]) -> Policy:
        """Read what :meth:`to_json` or :meth:`as_json` wrote; PolicyError where it is something else."""
        if isinstance(source, str):
            try:
                source = json.loads(source)
            except (ValueError, RecursionError) as error:
                raise PolicyError(f"not a Policy: {error}") from None
        if not isinstance(source, dict) or source.get("lowtide_policy") != FORMAT:
            raise PolicyError(f'not a Policy: expected an object with "lowtide_policy": {FORMAT}')
        _known(source, {"lowtide_policy", "origin", "fingerprint", "root", "layers", *_SWITCHES}, "a Policy")
        origin, fingerprint = source.get("origin", "file"), source.get("fingerprint")
        if origin not in ("file", "solver"):
            raise PolicyError(f'origin is "file" or "solver"; found {origin!r}')
        if fingerprint is not None and not isinstance(fingerprint, str):
            raise PolicyError(f"fingerprint is text or null; found {fingerprint!r}")
        switches = {name: source[name] for name in _SWITCHES if name in source}
        for name, switch in switches.items():
            if not isinstance(switch, bool):
                raise PolicyError(f"{name} is true or false; found {switch!r}")
        return Policy(
            layers=_layers_from_json(source.get("layers", [])),
            root=_layer_from_json(source.get("root", {}), "root"),
            origin=origin,
            fingerprint=fingerprint,
            **switches,
        )


_SWITCHES = ("mp_comm_recompute", "parallel_optimizer_comm_recompute", "recompute_slice_activation")


def format_layers(indices: Iterable[int]) -> str:
    """Write ascending layer indices in short.

    >>> format_layers([0, 1, 2, 5])
    '0-2,5'
    """
    spans: list[list[int]] = []
    for index in indices:
        if spans and index == spans[-1][1] + 1:
            spans[-1][1] = index
        else:
            spans.append([index, index])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def parse_layers(text: str) -> list[int]:
    """The reverse of :func:`format_layers`.

    >>> parse_layers("0-2,5")
    [0, 1, 2, 5]
    """
    indices: list[int] = []
    for span in text.split(",") if text else []:
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", span, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if last < first or last >= MAX_LAYERS or (indices and first <= indices[-1]):
            raise PolicyError(f'layers are written "0-2,5", ascending and below {MAX_LAYERS:,}; found {text[:80]!r}')
        indices += range(first, last + 1)
    return indices


def _grouped(layers: Sequence[LayerPolicy]) -> list[tuple[LayerPolicy, list[int]]]:
    groups: dict[LayerPolicy, list[int]] = {}
    for index, layer in enumerate(layers):
        groups.setdefault(layer, []).append(index)
    return list(groups.items())


def _layer_as_json(layer: LayerPolicy) -> dict[str, Any]:
    value: dict[str, Any] = {"default": decision_as_json(layer.default)}
    if layer.boundary != Keep():
        value["boundary"] = decision_as_json(layer.boundary)
    if layer.rules:
        value["rules"] = [
            {**_pattern_as_json(rule), "decision": decision_as_json(rule.decision)} for rule in layer.rules
        ]
    if layer.communication:
        value["communication"] = [{**_pattern_as_json(rule), "repeat": rule.repeat} for rule in layer.communication]
    return value


def _pattern_as_json(rule: Rule | CommRule) -> dict[str, Any]:
    value: dict[str, Any] = {"pattern": rule.pattern.text}
    if rule.pattern.syntax != "segments":
        value["syntax"] = rule.pattern.syntax
    if rule.builtin:
        value["builtin"] = True
    if isinstance(rule, Rule) and rule.operators_only:
        value["operators_only"] = True
    return value


def _layers_from_json(value: object) -> tuple[LayerPolicy, ...]:
    if not isinstance(value, list):
        raise PolicyError(f"layers is a list; found {type(value).__name__}")
    found: dict[int, LayerPolicy] = {}
    for position, entry in enumerate(value):
        where = f"layers[{position}]"
        if not isinstance(entry, dict) or not isinstance(entry.get("layers"), str):
            raise PolicyError(f'{where} is an object with "layers": "0-3"')
        layer = _layer_from_json({key: item for key, item in entry.items() if key != "layers"}, where)
        for index in parse_layers(entry["layers"]):
            if index in found:
                raise PolicyError(f"{where}: layer {index} has been decided before")
            found[index] = layer
    missing = next((index for index in range(len(found)) if index not in found), None)
    if missing is not None:
        raise PolicyError(f"layer {missing} has no decision")
    return tuple(found[index] for index in range(len(found)))


def _layer_from_json(value: object, where: str) -> LayerPolicy:
    if not isinstance(value, dict):
        raise PolicyError(f"{where} is an object; found {type(value).__name__}")
    _known(value, {"default", "boundary", "rules", "communication"}, where)
    boundary = decision_from_json(value.get("boundary", "keep"))
    if isinstance(boundary, Recompute):
        raise PolicyError(f"{where}: a layer's input can be kept or swapped; found recompute")
    return LayerPolicy(
        default=decision_from_json(value.get("default", "keep")),
        boundary=boundary,
        rules=tuple(
            Rule(
                _pattern_from_json(entry, ("decision",), ("operators_only",), where),
                decision_from_json(entry["decision"]),
                _flag(entry, "builtin"),
                _flag(entry, "operators_only"),
            )
            for entry in _entries(value, "rules", where)
        ),
        communication=tuple(
            CommRule(_pattern_from_json(entry, ("repeat",), (), where), _flag(entry, "repeat"), _flag(entry, "builtin"))
            for entry in _entries(value, "communication", where)
        ),
    )


def _entries(value: dict[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    entries = value.get(key, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise PolicyError(f"{where}: {key} is a list of objects")
    return entries


def _pattern_from_json(
    entry: dict[str, Any], required: tuple[str, ...], optional: tuple[str, ...], where: str
) -> Pattern:
    _known(entry, {"pattern", "syntax", "builtin", *required, *optional}, where)
    for key in ("pattern", *required):
        if key not in entry:
            raise PolicyError(f"{where}: an entry has no {key!r}")
    syntax = entry.get("syntax", "segments")
    if not isinstance(entry["pattern"], str) or syntax not in ("segments", "path"):
        raise PolicyError(f'{where}: a pattern is text, its syntax "segments" or "path"')
    return Pattern(entry["pattern"], syntax)


def _flag(entry: dict[str, Any], key: str) -> bool:
    value = entry.get(key, False)
    if not isinstance(value, bool):
        raise PolicyError(f"{key} is true or false; found {value!r}")
    return value


def _known(value: dict[str, Any], known: set[str], what: str) -> None:
    unknown = sorted(str(key) for key in value if key not in known)
    if unknown:
        raise PolicyError(f"{what} has {', '.join(sorted(known))}; found also {', '.join(unknown)}")

"""The Policy: for every layer and operator, what becomes of its activations. Plain data."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lowtide.errors import PolicyError
from lowtide.policy.decision import Decision, Keep, Recompute, Swap, decision_as_json, decision_from_json
from lowtide.policy.pattern import Pattern
from lowtide.policy.yaml import as_yaml

__all__ = [
    "YAML_KEYS",
    "CollectiveRule",
    "Communication",
    "LayerPolicy",
    "Policy",
    "Rule",
    "format_layers",
    "parse_layers",
]

FORMAT = 1
MAX_LAYERS = 100_000
KEEP = Keep()
EVERY = "*"
"""In the JSON form: the one entry of a Policy for every layer of any model."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Operators that match ``pattern``, which may be given as text, get ``decision``."""

    pattern: Pattern
    """Which operators."""
    decision: Decision
    """``Keep`` excludes them from everything else; ``Recompute`` wins over ``Swap``."""
    builtin: bool = False
    """Whether it is a default of the grammar rather than written by a person: a built-in pattern
    that matches nothing is no mistake as long as one of its siblings does."""
    operators_only: bool = False
    """Whether a match on a module counts for nothing, as the grammar has it for excludes."""

    if TYPE_CHECKING:

        def __init__(
            self, pattern: Pattern | str, decision: Decision, builtin: bool = False, operators_only: bool = False
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", _pattern(self.pattern))
        if not isinstance(self.decision, (Keep, Recompute, Swap)):
            raise PolicyError(f"a decision is Keep(), Recompute() or Swap(...); found {self.decision!r}")


@dataclass(frozen=True, slots=True)
class CollectiveRule:
    """Whether the collective at the operators that match ``pattern`` is re-issued in backward."""

    pattern: Pattern
    """Which operators; a module has no collective of its own, so a match on one has no effect."""
    reissue: bool = True
    """True drops the collective's result and re-issues it; False keeps the result, and wins."""
    builtin: bool = False
    """As in :class:`Rule`."""

    if TYPE_CHECKING:

        def __init__(self, pattern: Pattern | str, reissue: bool = True, builtin: bool = False) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", _pattern(self.pattern))


def _pattern(given: object) -> Pattern:
    """A pattern that may be given as text."""
    if isinstance(given, str):
        return Pattern(given)
    if not isinstance(given, Pattern):
        raise PolicyError(f"a rule's pattern is a Pattern or its text, such as 'mlp.act_fn'; found {given!r}")
    return given


@dataclass(frozen=True, slots=True)
class LayerPolicy:
    """The decisions for one layer."""

    default: Decision = KEEP
    """What becomes of an operator that no rule names. ``Recompute`` recomputes the whole layer."""
    rules: tuple[Rule, ...] = ()
    """Decisions by operator pattern."""
    boundary: Keep | Swap = KEEP
    """What becomes of the layer's input, the last value of the layer before it."""
    collectives: tuple[CollectiveRule, ...] = ()
    """Which collectives are re-issued in backward."""

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
        parts += [f"{rule.pattern}: {'re-issue' if rule.reissue else 'keep'} collective" for rule in self.collectives]
        if self.boundary != Keep():
            parts.append(f"input: {self.boundary}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Communication:
    """What a model that is spread over ranks communicates again in backward rather than keep."""

    reissue_collectives: bool = True
    """Whether a recomputed layer re-issues its tensor-parallel collectives, or keeps their results.

    ``mp_comm_recompute`` in MindSpore's YAML."""
    reshard_after_forward: bool = False
    """Whether layers that ``fully_shard`` sharded free their gathered parameters after forward and gather them again in
    backward. False leaves what the model's author chose.

    ``parallel_optimizer_comm_recompute`` in MindSpore's YAML."""
    slice_inputs: bool = False
    """Whether each tensor-parallel rank holds only its slice of a recomputed layer's input.

    ``recompute_slice_activation`` in MindSpore's YAML."""


YAML_KEYS = {
    "reissue_collectives": "mp_comm_recompute",
    "reshard_after_forward": "parallel_optimizer_comm_recompute",
    "slice_inputs": "recompute_slice_activation",
}
"""The settings of :class:`Communication` and their keys in MindSpore's YAML."""


@dataclass(frozen=True, repr=False)
class Policy:
    """What becomes of every activation of a model.

    A person's YAML and the solver both end in a Policy, and the runtime knows nothing else.

    >>> policy = Policy(layers=(LayerPolicy(default=Recompute()),) * 4)
    >>> policy
    Policy(4 layers, 558a56c0: 0-3: recompute)
    >>> Policy.from_json(policy.to_json()) == policy
    True
    """

    layers: tuple[LayerPolicy, ...]
    """One for each layer, in the model's order; multi-token-prediction layers come last."""
    origin: Literal["file", "solver"] = "file"
    """Who decided. In a Policy from a file, a swapped operator that directly feeds a recomputed
    one is not swapped, as the guides say; a solver may mean exactly that."""
    fingerprint: str | None = None
    """The model it was made for, or None if for none in particular."""
    communication: Communication = Communication()
    """What is communicated again in backward."""
    any_depth: bool = False
    """Whether the one entry of ``layers`` holds for every layer of a model, however many it has."""

    def __post_init__(self) -> None:
        if self.any_depth and len(self.layers) != 1:
            raise PolicyError(f"a Policy for any number of layers has one LayerPolicy; found {len(self.layers)}")

    @staticmethod
    def uniform(
        rules: Mapping[str, Decision] | Iterable[Rule] = (),
        default: Decision = KEEP,
        *,
        boundary: Keep | Swap = KEEP,
        collectives: Iterable[CollectiveRule] = (),
        communication: Communication | None = None,
        origin: Literal["file", "solver"] = "file",
    ) -> Policy:
        """The same decisions for every layer of whatever model it is used on; no number of layers is needed.

        ``rules`` maps patterns to decisions, or lists Rules.

        >>> Policy.uniform({"mlp.*": Recompute()}, default=Swap(2))
        Policy(every layer, 21055922: swap(2), mlp.*: recompute)
        """
        if isinstance(rules, Mapping):
            rules = (Rule(Pattern(text), decision) for text, decision in rules.items())
        layer = LayerPolicy(default, tuple(rules), boundary, tuple(collectives))
        return Policy((layer,), origin, communication=communication or Communication(), any_depth=True)

    def for_layers(self, count: int) -> Policy:
        """This Policy for a model with ``count`` layers: a uniform one gets as many; another is returned as it is."""
        return replace(self, layers=self.layers * count, any_depth=False) if self.any_depth else self

    @cached_property
    def digest(self) -> str:
        """A stable name of the content: equal Policies have equal digests, on every machine."""
        canonical = json.dumps(self.as_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def __repr__(self) -> str:
        if self.any_depth:
            return f"Policy(every layer, {self.digest[:8]}: {self.layers[0]})"
        groups = "; ".join(f"{format_layers(indices)}: {layer}" for layer, indices in _grouped(self.layers))
        return f"Policy({len(self.layers)} layers, {self.digest[:8]}: {groups})"

    def to_json(self) -> str:
        """The Policy as readable JSON text."""
        return json.dumps(self.as_json(), indent=1, ensure_ascii=False) + "\n"

    def as_json(self) -> dict[str, Any]:
        """The Policy as plain JSON values; equal layers share one entry."""
        value: dict[str, Any] = {
            "lowtide_policy": FORMAT,
            "origin": self.origin,
            "fingerprint": self.fingerprint,
            "communication": asdict(self.communication),
            "layers": [
                {"layers": EVERY if self.any_depth else format_layers(indices), **_layer_as_json(layer)}
                for layer, indices in _grouped(self.layers)
            ],
        }
        return value

    def save(self, file: str | Path) -> None:
        """Write the Policy into ``file``: as YAML if its name ends with ``.yaml`` or ``.yml``, otherwise as JSON.

        ``policy.save("policy.json")``; ``Policy.load("policy.json") == policy``
        """
        text = as_yaml(self.as_json()) if Path(file).suffix in (".yaml", ".yml") else self.to_json()
        Path(file).write_text(text, encoding="utf-8")

    @staticmethod
    def load(file: str | Path) -> Policy:
        """Read what :meth:`save` or ``lowtide plan -o`` wrote: JSON or YAML, which the content decides, not the name.

        PolicyError where it is no Policy. :func:`lowtide.load_policy` also reads training files and plans.
        """
        try:
            text = Path(file).read_text(encoding="utf-8")
            return Policy.from_json(text if text.lstrip().startswith("{") else _yaml_values(text))
        except OSError as error:
            raise PolicyError(f"{file}: {error.strerror}") from None
        except (PolicyError, UnicodeDecodeError) as error:
            raise PolicyError(f"{file}: {error}") from None

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
        _known(source, {"lowtide_policy", "origin", "fingerprint", "communication", "layers"}, "a Policy")
        origin, fingerprint = source.get("origin", "file"), source.get("fingerprint")
        if origin not in ("file", "solver"):
            raise PolicyError(f'origin is "file" or "solver"; found {origin!r}')
        if fingerprint is not None and not isinstance(fingerprint, str):
            raise PolicyError(f"fingerprint is text or null; found {fingerprint!r}")
        layers, any_depth = _layers_from_json(source.get("layers", []))
        communication = _communication_from_json(source.get("communication", {}))
        return Policy(layers, origin, fingerprint, communication, any_depth)


def _yaml_values(text: str) -> Any:
    from lowtide.config.parse import parse_document  # its YAML package is imported only for a file in YAML
    from lowtide.config.problem import Problems

    problems = Problems()
    value = parse_document(text, problems).value
    for problem in problems.errors[:1]:
        raise PolicyError(f"line {problem.line}, column {problem.column}: {problem.message}")
    return value


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
    if layer.collectives:
        value["collectives"] = [{**_pattern_as_json(rule), "reissue": rule.reissue} for rule in layer.collectives]
    return value


def _pattern_as_json(rule: Rule | CollectiveRule) -> dict[str, Any]:
    value: dict[str, Any] = {"pattern": rule.pattern.text}
    if rule.pattern.syntax != "segments":
        value["syntax"] = rule.pattern.syntax
    if rule.builtin:
        value["builtin"] = True
    if isinstance(rule, Rule) and rule.operators_only:
        value["operators_only"] = True
    return value


def _communication_from_json(value: object) -> Communication:
    if not isinstance(value, dict):
        raise PolicyError(f"communication is an object; found {type(value).__name__}")
    default = asdict(Communication())
    _known(value, set(default), "communication")
    return Communication(**{name: _flag(value, name, default[name]) for name in default})


def _layers_from_json(value: object) -> tuple[tuple[LayerPolicy, ...], bool]:
    """The layers, and whether they are one entry for every layer of any model."""
    if not isinstance(value, list):
        raise PolicyError(f"layers is a list; found {type(value).__name__}")
    found: dict[int, LayerPolicy] = {}
    for position, entry in enumerate(value):
        where = f"layers[{position}]"
        if not isinstance(entry, dict) or not isinstance(entry.get("layers"), str):
            raise PolicyError(f'{where} is an object with "layers": "0-3"')
        layer = _layer_from_json({key: item for key, item in entry.items() if key != "layers"}, where)
        if entry["layers"] == EVERY:
            if len(value) > 1:
                raise PolicyError(f'{where}: "layers": "{EVERY}" means every layer; no other entry can be given')
            return (layer,), True
        for index in parse_layers(entry["layers"]):
            if index in found:
                raise PolicyError(f"{where}: layer {index} has been decided before")
            found[index] = layer
    missing = next((index for index in range(len(found)) if index not in found), None)
    if missing is not None:
        raise PolicyError(f"layer {missing} has no decision")
    return tuple(found[index] for index in range(len(found))), False


def _layer_from_json(value: object, where: str) -> LayerPolicy:
    if not isinstance(value, dict):
        raise PolicyError(f"{where} is an object; found {type(value).__name__}")
    _known(value, {"default", "boundary", "rules", "collectives"}, where)
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
        collectives=tuple(
            CollectiveRule(
                _pattern_from_json(entry, ("reissue",), (), where), _flag(entry, "reissue"), _flag(entry, "builtin")
            )
            for entry in _entries(value, "collectives", where)
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


def _flag(entry: dict[str, Any], key: str, default: bool = False) -> bool:
    value = entry.get(key, default)
    if not isinstance(value, bool):
        raise PolicyError(f"{key} is true or false; found {value!r}")
    return value


def _known(value: dict[str, Any], known: set[str], what: str) -> None:
    unknown = sorted(str(key) for key in value if key not in known)
    if unknown:
        raise PolicyError(f"{what} has {', '.join(sorted(known))}; found also {', '.join(unknown)}")

"""Resolve a Policy against a model's operators: each gets exactly one decision.

Which setting wins, strongest first:

1. a ``Keep`` rule (an exclude);
2. ``Recompute``, of the whole layer or by a rule;
3. the first ``Swap`` rule that names the operator;
4. the whole layer's ``Swap``;
5. keep.

In a Policy from a file, a swapped operator whose output directly feeds a recomputed operator is
kept instead: the recomputation would want it back at once. Every setting that had no effect is
reported with the reason.

A pattern is matched against the names of the operators and their aliases alike; decisions are by
the operator's own name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from lowtide.errors import PolicyError, UnmatchedError
from lowtide.policy.decision import Decision, Keep, Recompute, Swap
from lowtide.policy.pattern import NameTree
from lowtide.policy.policy import CollectiveRule, LayerPolicy, Policy, Rule
from lowtide.policy.prefetch import count_in_operators
from lowtide.policy.resolution import Catalogue, Operator, Resolution, ResolvedLayer, Setting, Unused

__all__ = ["resolve"]


def resolve(policy: Policy, catalogue: Catalogue, *, require_match: bool = True) -> Resolution:
    """Give every operator of ``catalogue`` its one decision.

    With ``require_match`` a pattern that matches nothing in the model raises
    :class:`~lowtide.errors.UnmatchedError`; without it, it is reported in ``unused``.

    >>> layer = (Operator("attention.softmax"), Operator("mlp.silu"))
    >>> policy = Policy((LayerPolicy(rules=(Rule(Pattern("mlp.silu"), Recompute()),)),))
    >>> dict(resolve(policy, Catalogue((layer,))).layers[0].decisions)
    {'attention.softmax': Keep(), 'mlp.silu': Recompute()}
    """
    policy = policy.for_layers(len(catalogue.layers))
    if len(policy.layers) != len(catalogue.layers):
        raise PolicyError(
            f"the policy decides {len(policy.layers)} layers and the model has {len(catalogue.layers)};"
            " make the policy for this model"
        )
    report = _Report(catalogue.layers)
    done: dict[tuple[int, int], tuple[ResolvedLayer, list[_Outcome]]] = {}

    def layer(index: int, settings: LayerPolicy, operators: tuple[Operator, ...]) -> ResolvedLayer:
        # Layers of one kind with one policy are resolved once: cost follows kinds, not layers.
        key = (id(settings), id(operators))
        if key not in done:
            done[key] = _resolve_layer(settings, operators, from_file=policy.origin == "file")
        resolved, outcomes = done[key]
        for outcome in outcomes:
            report.add(index, outcome)
        return resolved

    layers = [
        layer(index, settings, operators)
        for index, (settings, operators) in enumerate(zip(policy.layers, catalogue.layers, strict=True))
    ]
    resolution = Resolution(tuple(count_in_operators(layers)), report.unused(), report.settings())
    if require_match and resolution.unmatched:
        raise UnmatchedError("\n".join(str(item) for item in resolution.unmatched))
    return resolution


_INCLUDED = (
    "the whole layer is recomputed",
    "the whole layer is recomputed; reissue_collectives (mp_comm_recompute) decides there",
)
"""Reasons that only say that the layer does more than was asked for."""


class _Outcome(NamedTuple):
    """What one setting did in one layer."""

    setting: Rule | CollectiveRule | None
    """None is the whole layer's default, or its input's decision."""
    action: str
    matched: bool
    reason: str
    """Empty if it had an effect."""
    named: tuple[str, ...] = ()
    """The operators it names, in order."""
    decided: tuple[str, ...] = ()
    """The operators whose decision is due to it."""
    label: str = "the whole layer"
    """What it is called if it is no rule."""


def _resolve_layer(
    settings: LayerPolicy, operators: tuple[Operator, ...], *, from_file: bool
) -> tuple[ResolvedLayer, list[_Outcome]]:
    names = [operator.name for operator in operators]
    if len(set(names)) != len(names):
        twice = next(name for position, name in enumerate(names) if name in names[:position])
        raise PolicyError(f"the catalogue lists the operator {twice} twice in one layer")
    vocabulary = _vocabulary(operators)
    tree = vocabulary.tree
    targets = [
        (rule, frozenset(vocabulary.own(rule.pattern.operators(tree, modules=not rule.operators_only))))
        for rule in settings.rules
    ]

    kept = _union(named for rule, named in targets if isinstance(rule.decision, Keep))
    recomputed = _union(named for rule, named in targets if isinstance(rule.decision, Recompute))
    if isinstance(settings.default, Recompute):
        recomputed |= set(names)
    recomputed -= kept

    decisions: dict[str, Decision] = {}
    winner: dict[str, Rule | None] = {}
    for name in names:
        if name in kept:
            decisions[name] = Keep()
        elif name in recomputed:
            decisions[name] = Recompute()
        else:
            rule = next((rule for rule, named in targets if isinstance(rule.decision, Swap) and name in named), None)
            decisions[name] = rule.decision if rule else settings.default
            winner[name] = rule
    feeds: dict[str, str] = {}
    if from_file:
        for operator in operators:
            reader = next((consumer for consumer in operator.consumers if consumer in recomputed), None)
            if isinstance(decisions[operator.name], Swap) and reader is not None:
                feeds[operator.name] = reader
        for name in feeds:
            decisions[name] = Keep()

    whole = isinstance(settings.default, Recompute)
    outcomes: list[_Outcome] = []
    for rule, named in targets:
        reason = _why_not(rule, named, decisions, winner, feeds, whole)
        matched = bool(named)
        if not matched and rule.operators_only and rule.pattern.matches(tree):
            matched, reason = True, "it names a module, and only operators can be excluded"
        due = tuple(name for name in names if name in named and _is_due(rule, name, decisions, winner, feeds, whole))
        order = tuple(name for name in names if name in named)
        outcomes.append(_Outcome(rule, str(rule.decision), matched, reason, order, due))
    if isinstance(settings.default, Swap) and names:
        due = tuple(name for name in names if name in winner and winner[name] is None and name not in feeds)
        reason = "" if due else "every operator of the layer is decided otherwise"
        outcomes.append(_Outcome(None, str(settings.default), True, reason, tuple(names), due))
    elif whole and names:
        due = tuple(name for name in names if name in recomputed)
        outcomes.append(_Outcome(None, str(settings.default), True, "", tuple(names), due))
    if isinstance(settings.boundary, Swap):
        outcomes.append(_Outcome(None, str(settings.boundary), True, "", label="the layer's input"))
    collectives = _Collectives(settings, vocabulary, whole)
    resolved = ResolvedLayer(decisions, settings.boundary, collectives.reissued, collectives.kept)
    return resolved, outcomes + collectives.outcomes


def _is_due(
    rule: Rule,
    name: str,
    decisions: Mapping[str, Decision],
    winner: Mapping[str, Rule | None],
    feeds: Mapping[str, str],
    whole: bool,
) -> bool:
    """Whether the decision of an operator that ``rule`` names is due to it."""
    if isinstance(rule.decision, Swap):
        return winner.get(name) is rule and name not in feeds
    return type(decisions[name]) is type(rule.decision) and not (whole and isinstance(rule.decision, Recompute))


def _why_not(
    rule: Rule,
    named: frozenset[str],
    decisions: Mapping[str, Decision],
    winner: Mapping[str, Rule | None],
    feeds: Mapping[str, str],
    whole: bool,
) -> str:
    """Why ``rule`` had no effect in this layer, or nothing if it had one."""
    if not named or isinstance(rule.decision, Keep):
        return ""
    if any(_is_due(rule, name, decisions, winner, feeds, whole) for name in named):
        return ""
    if isinstance(rule.decision, Recompute):
        return _INCLUDED[0] if whole else "an exclude keeps it"
    first = min(named)
    if first in feeds:
        return f"{first} directly feeds {feeds[first]}, which is recomputed"
    if isinstance(decisions[first], Recompute):
        return "it is recomputed, which wins over swap"
    if isinstance(decisions[first], Swap):
        return "an earlier swap entry names it"
    return "an exclude keeps it"


class _Vocabulary:
    """What patterns are matched against: the names of a layer's operators, and their aliases."""

    def __init__(self, operators: Sequence[Operator]) -> None:
        own = {operator.name: [operator.name] for operator in operators}
        others: dict[str, list[str]] = {}
        for operator in operators:
            for alias in operator.aliases:
                others.setdefault(alias, []).append(operator.name)
        self.meanings = others | own
        self.tree = NameTree.of([*own, *(alias for alias in others if alias not in own)])

    def own(self, names: Iterable[str]) -> list[str]:
        """The operators that names and aliases mean, by their own names, each once."""
        return list(dict.fromkeys(own for name in names for own in self.meanings[name]))


@lru_cache(maxsize=64)
def _vocabulary(operators: tuple[Operator, ...]) -> _Vocabulary:
    """Of layers that are alike, once: a planner resolves thousands of Policies."""
    return _Vocabulary(operators)


class _Collectives:
    """The collectives of a layer that are re-issued or kept, and what each setting did."""

    def __init__(self, settings: LayerPolicy, vocabulary: _Vocabulary, whole: bool) -> None:
        self.outcomes: list[_Outcome] = []
        reissued: dict[str, None] = {}
        kept: dict[str, None] = {}
        for rule in settings.collectives:
            matches = rule.pattern.matches(vocabulary.tree)
            operators = vocabulary.own(match.name for match in matches if not match.is_module)
            reason = ""
            if matches and not operators:
                reason = "it names a module, and only an operator has a collective"
            elif operators and rule.reissue and whole:
                reason = _INCLUDED[1]
            else:
                (reissued if rule.reissue else kept).update(dict.fromkeys(operators))
            action = "re-issue collective" if rule.reissue else "keep collective"
            due = tuple(operators) if not reason else ()
            self.outcomes.append(_Outcome(rule, action, bool(matches), reason, tuple(operators), due))
        self.reissued = tuple(name for name in reissued if name not in kept)
        self.kept = tuple(kept)


class _Report:
    """Gathers outcomes over layers into one line for each setting and reason."""

    def __init__(self, kinds: Sequence[tuple[Operator, ...]]) -> None:
        self.kinds = kinds
        self.matched: dict[tuple[object, str], bool] = {}
        self.layers: dict[tuple[object, str, str], list[int]] = {}
        self.alike: dict[_Outcome, list[int]] = {}

    def add(self, index: int, outcome: _Outcome) -> None:
        self.alike.setdefault(outcome, []).append(index)
        setting = (outcome.setting, outcome.action)
        self.matched[setting] = self.matched.get(setting, False) or outcome.matched
        self.layers.setdefault((*setting, outcome.reason), []).append(index)

    def settings(self) -> tuple[Setting, ...]:
        return tuple(
            Setting(
                str(outcome.setting.pattern) if outcome.setting is not None else outcome.label,
                outcome.action,
                tuple(layers),
                outcome.named,
                outcome.decided,
            )
            for outcome, layers in self.alike.items()
            if outcome.named or outcome.label != "the whole layer"
        )

    def unused(self) -> tuple[Unused, ...]:
        items: list[Unused] = []
        tree: NameTree | None = None
        for (setting, action, reason), layers in self.layers.items():
            builtin = setting.builtin if isinstance(setting, (Rule, CollectiveRule)) else False
            label = str(setting.pattern) if isinstance(setting, (Rule, CollectiveRule)) else "the whole layer"
            if self.matched[setting, action]:
                somewhere = (setting, action, "") in self.layers
                if reason and not (somewhere and reason in _INCLUDED):
                    items.append(Unused(label, action, tuple(layers), reason, "overruled", (), builtin))
                continue
            if builtin and self._sibling_matched(setting, action):
                continue
            tree = tree or NameTree.of(
                dict.fromkeys(name for kind in self.kinds for o in kind for name in (o.name, *o.aliases))
            )
            near = setting.pattern.nearest(tree) if isinstance(setting, (Rule, CollectiveRule)) else ()
            items.append(
                Unused(label, action, tuple(layers), "no operator or module has this name", "unmatched", near, builtin)
            )
        return tuple(items)

    def _sibling_matched(self, setting: object, action: str) -> bool:
        return any(
            matched and type(other) is type(setting) and isinstance(other, (Rule, CollectiveRule)) and other.builtin
            for (other, what), matched in self.matched.items()
            if what == action
        )


def _union(sets: Iterable[frozenset[str]]) -> set[str]:
    return set().union(*sets)

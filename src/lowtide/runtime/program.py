"""What a layer does with each tensor that autograd saves in it, worked out once from its kind and its decisions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from lowtide.operators.calls import Site
from lowtide.operators.kinds import LayerKind
from lowtide.policy import Decision, Keep, Recompute, Swap
from lowtide.runtime.ledger import Ledger, Line

__all__ = ["BOUNDARY", "Action", "LayerProgram", "compile_layer"]

BOUNDARY = "input"
"""What the receipt calls a layer's own input."""


class Action(NamedTuple):
    """What becomes of one saved tensor."""

    swap: Swap | None
    """How it is swapped; None if it is rebuilt."""
    owner: str
    """Whose value it is."""
    last: bool
    """Whether it is the last of its storage, and so the first that backward asks for."""
    cast: bool
    """Whether it is a cast of the owner's value."""
    dtype: torch.dtype
    rank: int
    line: Line
    """Where it is counted."""


class LayerProgram(NamedTuple):
    """The actions of one layer."""

    layer: int
    """The layer's place in the model."""
    kind: LayerKind
    actions: tuple[Action | None, ...]
    """One for each tensor that is saved, in order; None keeps it."""
    own: tuple[bool, ...]
    """For each tensor that is saved, whether the operator that saves it also made it."""
    positions: tuple[int, ...]
    """For each tensor that is saved, the place of the operator that saves it."""
    recomputed: frozenset[str]
    """The operators whose calls are captured and repeated."""
    refused: tuple[str, ...]
    """The operators that were to be recomputed and are kept, since their call cannot be repeated."""
    sites: Mapping[str, tuple[Site, ...]]
    """Where to listen: the calls of recomputed operators, of casts of what they produce, and of readers that cast."""
    known: frozenset[str]
    """All operators; a call that is none of them only views or casts."""
    random: frozenset[str]
    """The operators that draw random numbers."""
    longest: int
    """The largest prefetch."""

    @property
    def empty(self) -> bool:
        """Whether nothing is to be done."""
        return not any(self.actions)


def compile_layer(
    index: int, kind: LayerKind, decisions: Mapping[str, Decision], boundary: Keep | Swap, ledger: Ledger
) -> LayerProgram:
    """Work out what layer ``index`` does."""
    facts = {operator.name: operator for operator in kind.operators}
    asked = [name for name, decision in decisions.items() if isinstance(decision, Recompute)]
    recomputed = frozenset(name for name in asked if facts[name].repeatable)
    refused = tuple(name for name in asked if not facts[name].repeatable and facts[name].owned)
    places = {name: place for place, name in enumerate(facts)}
    last = {pack.storage: number for number, pack in enumerate(kind.packs)}
    actions: list[Action | None] = []
    positions: list[int] = []
    position = 0
    for number, pack in enumerate(kind.packs):
        position = places.get(pack.operator, position)
        positions.append(position)
        owner = BOUNDARY if pack.source == "boundary" else pack.owner
        decision = boundary if pack.source == "boundary" else decisions.get(pack.owner, Keep())
        if not pack.movable or pack.source not in ("operator", "boundary") or isinstance(decision, Keep):
            actions.append(None)
            continue
        if isinstance(decision, Recompute) and owner not in recomputed:
            actions.append(None)
            continue
        swap = decision if isinstance(decision, Swap) else None
        line = ledger.line(index, owner)
        final = last[pack.storage] == number
        actions.append(Action(swap, owner, final, pack.cast, pack.dtype, len(pack.shape), line))
    prefetches = [action.swap.prefetch for action in actions if action is not None and action.swap is not None]
    return LayerProgram(
        index,
        kind,
        tuple(actions),
        tuple(pack.owner == pack.operator for pack in kind.packs),
        tuple(positions),
        recomputed,
        refused,
        _sites(kind, recomputed),
        frozenset(facts),
        frozenset(name for name, operator in facts.items() if operator.random),
        max(prefetches, default=0),
    )


def _sites(kind: LayerKind, recomputed: frozenset[str]) -> dict[str, tuple[Site, ...]]:
    if not recomputed:
        return {}
    casting = {pack.operator for pack in kind.packs if pack.cast and pack.owner in recomputed}
    sites: dict[str, tuple[Site, ...]] = {}
    for call in kind.calls:
        follows = not call.writes and any(read in recomputed for read in call.reads)
        if call.name in recomputed or call.name in casting or follows:
            sites[call.name] = (*sites.get(call.name, ()), call.site)
    return sites

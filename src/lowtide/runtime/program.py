"""What a layer does with each tensor that autograd saves in it, compiled once from its kind and its decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from lowtide.operators.calls import Site
from lowtide.operators.kinds import LayerKind
from lowtide.operators.observation import Pack
from lowtide.operators.saved import Kept, kept, kept_apart
from lowtide.policy import Decision, Keep, Recompute, Swap
from lowtide.runtime.ledger import Ledger, Line

__all__ = ["BOUNDARY", "Action", "LayerProgram", "compile_layer"]

BOUNDARY = "input"
"""What the receipt calls a layer's own input."""


@dataclass(frozen=True, slots=True)
class Action:
    """What becomes of one saved tensor."""

    decision: Decision
    """``Keep`` where all there is to do is to notice that this operator runs."""
    position: int
    """The index of the operator that saves it."""
    owner: str
    """Whose value it is."""
    last: bool
    """Whether it is the last of its storage, and so the first that backward unpacks."""
    alone: bool
    """Whether nothing else needs its storage: no other saved tensor, no call to be replayed."""
    cast: bool
    """Whether it is a cast of the owner's value."""
    apart: bool
    """Whether it is detached if it is kept: its node made it, or it may be written to and get the graph of that write.
    See [Note: lifetime]."""
    collective: bool
    """Whether its owner communicates: then only what a collective itself returned is recomputed, by re-issuing it."""
    dtype: torch.dtype
    rank: int
    line: Line
    """Where it is counted."""


Keeping: TypeAlias = Callable[[Tensor], Kept]
"""How a tensor is kept where there is nothing else to do."""


class LayerProgram(NamedTuple):
    """The actions of one layer."""

    layer: int
    """The layer's index in the model."""
    actions: tuple[Action | Keeping, ...]
    """One for each tensor that is saved, in order; a function keeps it, and says how."""
    captured: Mapping[str, Line]
    """The operators whose calls are captured and replayed, and where that is counted."""
    refused: tuple[str, ...]
    """The operators that were to be recomputed and are kept, since their calls cannot be replayed."""
    sites: Mapping[str, tuple[Site, ...]]
    """Which calls to intercept: those of recomputed operators, of casts of what they produce, and of readers that
    cast."""
    known: frozenset[str]
    """All operators; a call that is none of them only views or casts."""
    reissued: tuple[str | None, ...]
    """For each collective that the layer issues, in order: its operator if backward needs its result recomputed."""
    due: frozenset[int]
    """At how many operators after the layer's first something is due: memory to free, or a reload to start. Some of it
    lies in the layers that follow."""

    @property
    def captures(self) -> bool:
        """Whether calls are captured while the layer runs, or collectives."""
        return bool(self.captured) or any(self.reissued)

    @property
    def idle(self) -> bool:
        """Whether the layer keeps everything."""
        return all(not isinstance(action, Action) or isinstance(action.decision, Keep) for action in self.actions)


def compile_layer(
    index: int,
    kind: LayerKind,
    decisions: Mapping[str, Decision],
    boundary: Keep | Swap,
    ledger: Ledger,
    due_before: frozenset[int] = frozenset(),
) -> LayerProgram:
    """The program of layer ``index``; ``due_before`` is what earlier layers have due in it."""
    facts = {operator.name: operator for operator in kind.operators}
    asked = [name for name, decision in decisions.items() if isinstance(decision, Recompute)]
    recomputed = frozenset(name for name in asked if facts[name].repeatable)
    communicating = {call.name for call in kind.calls if call.communicates}
    needed = _needed(kind, recomputed)
    reissued = tuple(name if name in needed else None for name in kind.collectives)
    captured = recomputed - communicating
    first = {pack.storage: number for number, pack in reversed(list(enumerate(kind.packs)))}
    last = {pack.storage: number for number, pack in enumerate(kind.packs)}

    def decide(pack: Pack) -> Decision:
        if not pack.movable or pack.altered:
            return Keep()
        if pack.source == "boundary":
            return boundary
        decision = decisions.get(pack.owner, Keep()) if pack.source == "operator" else Keep()
        return Keep() if isinstance(decision, Recompute) and pack.owner not in recomputed else decision

    due = set(due_before)
    for position, pack in zip(kind.positions, kind.packs, strict=True):
        decision = decide(pack)
        if pack.altered and isinstance(decisions.get(pack.owner), Swap):
            ledger.line(index, pack.owner).keep(pack.storage_bytes, "written to without a new version")
        if isinstance(decision, Swap):
            due.add(position + decision.prefetch)
    waiting = sorted(due)
    actions: list[Action | Keeping] = []
    for number, (position, pack) in enumerate(zip(kind.positions, kind.packs, strict=True)):
        decision = decide(pack)
        reached = bool(waiting) and waiting[0] <= position
        while waiting and waiting[0] <= position:
            waiting.pop(0)
        # Inside the layer nothing wrote to the others when it was profiled, and outside it nothing else has them.
        apart = pack.rewritten or pack.output or pack.source in ("boundary", "root")
        if isinstance(decision, Keep) and not reached:
            actions.append(kept_apart if apart else kept)
            continue
        owner = BOUNDARY if pack.source == "boundary" else pack.owner
        final = last[pack.storage] == number
        actions.append(
            Action(
                decision,
                position,
                owner,
                last=final,
                alone=final and first[pack.storage] == number and not captured and not any(reissued),
                cast=pack.cast,
                apart=apart,
                collective=owner in communicating,
                dtype=pack.dtype,
                rank=len(pack.shape),
                line=ledger.line(index, owner),
            )
        )
    return LayerProgram(
        index,
        tuple(actions),
        {name: ledger.line(index, name) for name in captured},
        tuple(name for name in asked if not facts[name].repeatable and facts[name].owned),
        _sites(kind, captured),
        frozenset(facts),
        reissued,
        frozenset(due),
    )


def _needed(kind: LayerKind, recomputed: frozenset[str]) -> frozenset[str]:
    """The recomputed operators whose results backward needs: owners of saved tensors, and what they are made of."""
    reads: dict[str, set[str]] = {}
    for call in kind.calls:
        reads.setdefault(call.name, set()).update(call.reads)
    waiting = [pack.owner for pack in kind.packs if pack.source == "operator" and pack.movable]
    needed = set[str]()
    while waiting:
        name = waiting.pop()
        if name in recomputed and name not in needed:
            needed.add(name)
            waiting += reads.get(name, ())
    return frozenset(needed)


def _sites(kind: LayerKind, captured: frozenset[str]) -> dict[str, tuple[Site, ...]]:
    if not captured:
        return {}
    casting = {pack.operator for pack in kind.packs if pack.cast and pack.owner in captured}
    sites: dict[str, tuple[Site, ...]] = {}
    for call in kind.calls:
        follows = not call.writes and call.repeatable and any(read in captured for read in call.reads)
        if call.name in captured or call.name in casting or follows:
            sites[call.name] = (*sites.get(call.name, ()), call.site)
    return sites

"""What a layer does with each tensor that autograd saves in it, worked out once from its kind and its decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from lowtide.operators.calls import Site
from lowtide.operators.from_nodes import from_nodes
from lowtide.operators.kept import Kept, kept, kept_apart
from lowtide.operators.kinds import LayerKind
from lowtide.operators.observe import Pack
from lowtide.policy import Decision, Keep, Recompute, Swap
from lowtide.runtime.ledger import Ledger, Line

__all__ = ["BOUNDARY", "WHOLE", "Action", "LayerProgram", "compile_layer"]

BOUNDARY = "input"
"""What the receipt calls a layer's own input."""
WHOLE = "the whole layer"
"""What the receipt calls a layer that is recomputed as a whole."""


@dataclass(frozen=True, slots=True)
class Action:
    """What becomes of one saved tensor."""

    decision: Decision
    """Keep where all there is to do is to notice that this operator runs, or to hold an output apart from its node."""
    position: int
    """The place of the operator that saves it."""
    owner: str
    """Whose value it is."""
    last: bool
    """Whether it is the last of its storage, and so the first that backward asks for."""
    alone: bool
    """Whether nothing else will ask for its storage: no other saved tensor, no call to be repeated."""
    quick: bool
    """Whether nothing is due here and it is rebuilt from its node, or is swapped to host memory, alone and all of its
    storage: on the host itself, one copy does all of that."""
    by_node: bool
    """Whether it is rebuilt from what its node saved."""
    shared: bool
    """Whether its storage is saved more than once."""
    cast: bool
    """Whether it is a cast of the owner's value."""
    output: bool
    """Whether the node that saves it made it. See [Note: lifetime]."""
    checked: bool
    """Whether it may be written to after it is saved, and then gets the graph of that write."""
    collective: bool
    """Whether its owner communicates: then only what a collective itself gave is recomputed, from that collective."""
    dtype: torch.dtype
    rank: int
    line: Line
    """Where it is counted."""


Keeping: TypeAlias = Callable[[Tensor], Kept]
"""How a tensor is kept where nothing else is to be done: compared when it is used, as torch does where no hooks are,
and apart from its graph where that might be what it is held for."""


class Part(NamedTuple):
    """A module of a layer that is called once, and the tensors that are saved while it runs."""

    module: str
    """Its path; empty for the layer itself."""
    start: int
    """The place of the first of them among all that the layer saves."""
    stop: int


class LayerProgram(NamedTuple):
    """The actions of one layer."""

    layer: int
    """The layer's place in the model."""
    actions: tuple[Action | Keeping, ...]
    """One for each tensor that is saved, in order; a function keeps it, and says how."""
    captured: Mapping[str, Line]
    """The operators whose calls are captured and repeated, and where that is counted. Those that are recomputed from
    their nodes are not among them."""
    refused: tuple[str, ...]
    """The operators that were to be recomputed and are kept, since their call cannot be repeated."""
    sites: Mapping[str, tuple[Site, ...]]
    """Where to listen: the calls of recomputed operators, of casts of what they produce, and of readers that cast."""
    known: frozenset[str]
    """All operators; a call that is none of them only views or casts."""
    reissued: tuple[str | None, ...]
    """For each collective that the layer issues, in order: its operator if backward needs its result recomputed."""
    due: frozenset[int]
    """How many operators after the layer's first something is due: memory to let go, or a copy back to start. Some of
    it lies in the layers that follow."""

    part: Part
    """The part of the layer in which all of this happens."""

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
    *,
    positions: Sequence[int] | None = None,
    noticed: bool = False,
) -> LayerProgram:
    """Work out what layer ``index`` does; ``due_before`` is what earlier layers have due in it.

    ``positions`` are the places of the operators that save, where they do not follow each other as in a layer. With
    ``noticed`` each of them is noticed when it runs, whatever is due.
    """
    facts = {operator.name: operator for operator in kind.operators}
    asked = [name for name, decision in decisions.items() if isinstance(decision, Recompute)]
    recomputed = frozenset(name for name in asked if facts[name].repeatable)
    by_node = from_nodes(kind.packs, [(call.name, call.reads) for call in kind.calls], recomputed)
    communicating = {call.name for call in kind.calls if call.communicates}
    needed = _needed(kind, recomputed)
    reissued = tuple(name if name in needed else None for name in kind.collectives)
    captured = recomputed - by_node - communicating
    following = captured | {name for name in reissued if name is not None}
    positions = positions or kind.positions
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
    for position, pack in zip(positions, kind.packs, strict=True):
        decision = decide(pack)
        if pack.altered and isinstance(decisions.get(pack.owner), Swap):
            ledger.line(index, pack.owner).keep(pack.storage_bytes, "written to in a way that torch does not count")
        if isinstance(decision, Swap) and not (pack.on_host and decision.tier == "host"):
            due.add(position + decision.prefetch)
    waiting = sorted(due)
    actions: list[Action | Keeping] = []
    for number, (position, pack) in enumerate(zip(positions, kind.packs, strict=True)):
        decision = decide(pack)
        reached = noticed or (bool(waiting) and waiting[0] <= position)
        while waiting and waiting[0] <= position:
            waiting.pop(0)
        # Inside the layer nobody wrote to the others when it was learnt, and outside it nobody else has them.
        checked = pack.rewritten or pack.source in ("boundary", "root")
        if isinstance(decision, Keep) and not reached:
            actions.append(kept_apart if checked or pack.output else kept)
            continue
        owner = BOUNDARY if pack.source == "boundary" else pack.owner
        final = last[pack.storage] == number
        shared = not final or first[pack.storage] != number
        alone = not shared and not following
        rebuilt = isinstance(decision, Recompute) and owner in by_node
        plain = alone and isinstance(decision, Swap) and decision.tier == "host" and _dense(pack)
        actions.append(
            Action(
                decision,
                position,
                owner,
                last=final,
                alone=alone,
                quick=not reached and (rebuilt or plain),
                by_node=rebuilt,
                shared=shared,
                cast=pack.cast,
                output=pack.output,
                checked=checked,
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
        Part("", 0, len(actions)) if due or following else _part(kind, actions),
    )


def _needed(kind: LayerKind, recomputed: frozenset[str]) -> frozenset[str]:
    """The recomputed operators whose results backward asks for: owners of saved tensors, and what they are made of."""
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


def _part(kind: LayerKind, actions: Sequence[Action | Keeping]) -> Part:
    """The smallest module that everything is saved in that something becomes of, and that its nodes stand in.

    Torch's hooks cost more than anything that we do in them, and outside of this module they are not needed.
    """
    modules: dict[str, set[str]] = {}
    for call in kind.calls:
        modules.setdefault(call.name, set()).add(call.site.module)
    concerned = set[str]()
    for action, pack in zip(actions, kind.packs, strict=True):
        if isinstance(action, Action):
            concerned |= modules.get(pack.operator, {""})
            if action.by_node:
                concerned |= modules.get(action.owner, {""})
    path = _common([name.split(".") if name else [] for name in concerned])
    while path:
        module, below = ".".join(path), ".".join([*path, ""])
        sites = [call.site for call in kind.calls if f"{call.site.module}.".startswith(below)]
        places = [
            place
            for place, pack in enumerate(kind.packs)
            if all(f"{name}.".startswith(below) for name in modules.get(pack.operator, {""}))
        ]
        # A module that nothing was called in itself may only hold others, and one that runs twice is not one place.
        called = any(site.module == module for site in sites)
        once = len(set(sites)) == len(sites)
        if called and once and places == list(range(places[0], places[-1] + 1)):
            return Part(module, places[0], places[-1] + 1)
        path.pop()
    return Part("", 0, len(actions))


def _common(paths: list[list[str]]) -> list[str]:
    """What all paths begin with."""
    found: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        found.append(parts[0])
    return found


def _dense(pack: Pack) -> bool:
    """Whether the tensor is all of its storage."""
    return prod(pack.shape) * pack.dtype.itemsize == pack.storage_bytes


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

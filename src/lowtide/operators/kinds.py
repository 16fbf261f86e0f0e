"""What a layer consists of: its operators, and the bytes that each holds for backward."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from lowtide.operators.families import aliases_of
from lowtide.operators.observation import Call, Observation, Pack
from lowtide.policy import Operator

__all__ = ["LayerKind", "OperatorBytes", "layer_kind"]


class OperatorBytes(NamedTuple):
    """One operator of a layer and what it holds for backward."""

    name: str
    """Its dotted path inside the layer."""
    owned: int
    """The bytes of the tensors saved for backward that it wrote last, each storage once."""
    net: int
    """What recomputing it alone would save: ``owned`` less the inputs that would be held only for the rebuild.
    Zero or negative where that is no gain."""
    random: bool
    """Whether it draws random numbers, which a rebuild has to draw again."""
    repeatable: bool
    """Whether its call can be replayed: it wrote into none of its inputs, nothing did afterwards, and of what it
    received from other ranks it made nothing else."""
    consumers: tuple[str, ...]
    """The operators that read its value."""


class LayerKind(NamedTuple):
    """A class of layers that save the same tensors in the same order."""

    name: str
    """The class of the layers."""
    digest: str
    """A stable name of the operator list."""
    operators: tuple[OperatorBytes, ...]
    """In the order they first ran."""
    packs: tuple[Pack, ...]
    """Every tensor saved for backward, in order."""
    calls: tuple[Call, ...]
    """Every call of an operator, in order; those that only view or cast included."""
    owners: Mapping[int, str]
    """For each storage that an operator wrote, by number, the operator that wrote it last."""
    collectives: tuple[str, ...]
    """The operator of each functional collective that was issued, in order."""
    boundary: int
    """The bytes of the layer's input, where backward needs it."""
    root: int
    """The bytes that came from outside: masks, rotary tables."""
    static: int
    """The bytes derived from parameters alone, which are never moved."""
    kept: int
    """The bytes of integers and booleans, which are always kept."""

    @property
    def catalogue(self) -> tuple[Operator, ...]:
        """The operators as a Policy is resolved against them, with the names that users of the guides know."""
        aliases = aliases_of(operator.name for operator in self.operators)
        return tuple(Operator(operator.name, operator.consumers, aliases[operator.name]) for operator in self.operators)

    @property
    def positions(self) -> list[int]:
        """For each saved tensor, the index of the operator that saves it: a prefetch counts in these."""
        indices = {operator.name: index for index, operator in enumerate(self.operators)}
        positions: list[int] = []
        for pack in self.packs:  # calls that only view or cast are not operators
            positions.append(indices.get(pack.operator, positions[-1] if positions else 0))
        return positions


def layer_kind(layer: nn.Module, seen: Observation, *, held_elsewhere: Iterable[int] = ()) -> LayerKind:
    """Sum up what one run of ``layer`` showed; ``held_elsewhere`` are storages that other parts hold for backward."""
    names = list(dict.fromkeys(call.name for call in seen.calls if call.writes))
    consumers: dict[str, dict[str, None]] = {name: {} for name in names}
    for call in seen.calls:
        for read in call.reads if call.writes else ():
            if read != call.name:
                consumers[read][call.name] = None
    moved = [pack for pack in seen.packs if pack.movable]
    held = {pack.storage for pack in seen.packs}.union(held_elsewhere)
    operators = []
    for name in names:
        owned = _bytes([pack for pack in moved if pack.source == "operator" and pack.owner == name])
        calls = [call for call in seen.calls if call.name == name]
        extra = {number: size for call in calls for number, size in call.inputs if number not in held}
        random, repeatable = any(call.random for call in calls), all(call.repeatable for call in calls)
        operators.append(
            OperatorBytes(name, owned, owned - sum(extra.values()), random, repeatable, tuple(consumers[name]))
        )
    digest = hashlib.sha256("\n".join([type(layer).__qualname__, *names]).encode()).hexdigest()[:12]
    return LayerKind(
        type(layer).__name__,
        digest,
        tuple(operators),
        seen.packs,
        seen.calls,
        seen.owners,
        seen.collectives,
        boundary=_bytes([pack for pack in moved if pack.source == "boundary"]),
        root=_bytes([pack for pack in moved if pack.source == "root"]),
        static=_bytes([pack for pack in seen.packs if pack.source == "static"]),
        kept=_bytes([pack for pack in seen.packs if not pack.movable and pack.source != "static"]),
    )


def _bytes(packs: Sequence[Pack]) -> int:
    return sum({pack.storage: pack.storage_bytes for pack in packs}.values())

"""Which recomputed operators need no captured call: what they gave can be had from autograd's own nodes.

The runtime and the simulator both ask, each with its own packs and calls. No torch here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

__all__ = ["SavedValue", "from_nodes"]


class SavedValue(Protocol):
    """What of a saved tensor decides it."""

    @property
    def source(self) -> str:
        """Whose value it is: ``operator`` for an operator's of the layer."""

    @property
    def owner(self) -> str:
        """The operator that owns it."""

    @property
    def movable(self) -> bool:
        """False for what is always kept."""

    @property
    def cast(self) -> bool:
        """Whether it is a cast of the owner's value."""

    @property
    def by_node(self) -> bool:
        """Whether the node that made it has saved all that it was made of."""


def from_nodes(
    packs: Iterable[SavedValue], calls: Collection[tuple[str, Sequence[str]]], recomputed: frozenset[str]
) -> frozenset[str]:
    """The recomputed operators of which everything that is saved can be had from the nodes that made it.

    Not those that a captured call reads: what it holds of its arguments is known by their calls. ``calls`` are an
    operator and those whose values it reads.
    """
    found: dict[str, bool] = {}
    for pack in packs:
        if pack.source == "operator" and pack.owner in recomputed and pack.movable:
            found[pack.owner] = found.get(pack.owner, True) and pack.by_node and not pack.cast
    names, before = {name for name, every in found.items() if every}, -1
    while len(names) != before:
        before = len(names)
        for name, reads in calls:
            if name in recomputed and name not in names:
                names.difference_update(reads)
    return frozenset(names)

"""What a layer's collective rules mean for its operators, once it is known which of them read what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lowtide.policy.decision import Decision, Keep, Recompute
from lowtide.policy.resolution import ResolvedLayer

__all__ = ["Reads", "joined", "with_collectives"]

Reads = Mapping[str, frozenset[str]]
"""For each operator, the operators whose values it reads."""


def joined(calls: Iterable[tuple[str, Iterable[str]]]) -> Reads:
    """What each operator reads, in all of its calls.

    >>> joined([("gather", ["norm"]), ("gather", ["act"])])["gather"] == {"norm", "act"}
    True
    """
    found: dict[str, frozenset[str]] = {}
    for name, reads in calls:
        found[name] = found.get(name, frozenset()) | frozenset(reads)
    return found


def with_collectives(
    resolved: ResolvedLayer, collectives: Reads, ordering: Reads, *, keep_all: bool = False
) -> tuple[dict[str, Decision], list[str]]:
    """Return a layer's decisions by operator, collectives included, and the rules that re-issue nothing.

    A rule names an operator, and means that operator, if it is a collective, and the collectives that read its output,
    such as the gather after a sequence-parallel norm. A collective's result may have to be put in order by a ``cat``;
    those are in ``ordering`` and count as a part of it. With ``keep_all``, no collective is re-issued only because its
    layer is recomputed.
    """
    changed = dict(resolved.decisions)

    def at(operator: str) -> list[str]:
        return [name for name, reads in collectives.items() if operator in reads or name == operator]

    kept = list(collectives) if keep_all else []
    kept += [name for operator in resolved.kept_collectives for name in at(operator)]
    changed.update({name: Keep() for name in kept if changed.get(name) == Recompute()})
    idle: list[str] = []
    for operator in resolved.reissued_collectives:
        found = at(operator)
        parts = [name for name, reads in ordering.items() if reads and reads <= set(found)]
        names = [name for name in [*found, *parts] if changed.get(name) == Keep()]
        changed.update(dict.fromkeys(names, Recompute()))
        if not names:
            idle.append(operator)
    return changed, idle

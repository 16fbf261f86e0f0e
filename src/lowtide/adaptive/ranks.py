"""What the ranks of a run agree on: one Trace, one budget, one Policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from lowtide.adaptive.agreement import Agreement
from lowtide.adaptive.decide import Decided
from lowtide.adaptive.lengths import Shape
from lowtide.adaptive.merge import Kind, joined, kind_of, merge, unmerged
from lowtide.errors import PolicyError
from lowtide.planner.pipeline import Pipeline
from lowtide.trace.trace import Part, Trace, kernels_of

__all__ = ["Ranks"]

DIMENSIONS = 6
"""No batch has more of them, as far as ranks compare them."""
PATIENCE = timedelta(minutes=30)
"""How long ranks wait for the first one to make a plan."""


class Ranks:
    """All ranks, and those of each pipeline stage.

    A rank sends and receives as much whatever the number of ranks, but for 16 bytes a rank where the ranks of a stage
    ran different kernels, and a Trace for each time that their number can be halved. With ``alone``, each rank decides
    by itself.
    """

    def __init__(self, stage: int = 0, *, alone: bool = False) -> None:
        self.all = Agreement(PATIENCE, alone=alone)
        stages = self.all.of_every_rank(stage)
        of_stage = {
            one: [rank for rank, theirs in zip(self.all.ranks, stages, strict=True) if theirs == one]
            for one in sorted(set(stages))
        }
        self.leaders = {one: ranks[0] for one, ranks in of_stage.items()}
        self.stage = self.all
        if len(of_stage) > 1:
            groups = {one: Agreement(PATIENCE, ranks, alone=alone) for one, ranks in of_stage.items()}
            self.stage = groups[stage]

    @property
    def first(self) -> bool:
        """Whether this is the rank that plans, prints and writes."""
        return self.all.rank == 0

    def trace(self, chunks: Sequence[Trace], pipeline: Pipeline) -> Trace:
        """The Trace of the whole model: the slowest times of each stage's ranks, and all stages joined."""
        mine = [self._slowest(trace) for trace in chunks]
        if self.all.alone and len(mine) == 1:
            return mine[0]
        found: list[tuple[int, Trace]] = []
        for stage, leader in self.leaders.items():
            theirs = self.all.from_rank([trace.as_json() for trace in mine], leader)
            for chunk, value in zip(pipeline.placement[stage], theirs, strict=True):
                found.append((chunk[0], Trace.from_json(value)))
        return joined([trace for _, trace in sorted(found, key=lambda one: one[0])])

    def _slowest(self, trace: Trace) -> Trace:
        stage = self.stage
        if stage.alone:
            return trace
        plain = trace.without_seconds().digest
        if stage.all(plain == stage.from_first(plain)):
            return _with_seconds(trace, stage.largest([kernel.seconds or 0.0 for kernel in kernels_of(trace)]))
        # Experts are not equally loaded: the largest of each tensor is used.
        mine = kind_of(trace)
        kinds = map(Kind, stage.of_every_rank(mine.structure), stage.of_every_rank(mine.held))
        return stage.merged(unmerged(trace, stage.ranks.index(stage.rank), list(kinds)), merge).result()

    def batch(self, shape: Shape, flags: Sequence[bool]) -> tuple[Shape, list[bool]]:
        """The shape that covers the batches of all ranks; and for each flag, whether it is set on any."""
        if self.all.alone:
            return shape, list(flags)
        sizes = [*shape[:DIMENSIONS], *[0] * (DIMENSIONS - len(shape))]
        found = [int(one) for one in self.all.largest([*sizes, *flags])]
        return tuple(one for one in found[:DIMENSIONS] if one), [bool(one) for one in found[DIMENSIONS:]]

    def smallest(self, number: int) -> int:
        """The smallest number of all ranks."""
        return -int(self.all.largest([-number])[0])

    def largest(self, number: int) -> int:
        """The largest number of all ranks."""
        return int(self.all.largest([number])[0])

    def decided(self, mine: Decided | None) -> Decided:
        """What the first rank decided, on every rank; PolicyError if the ranks do not have the same Policy."""
        decided = self.all.from_first(mine)
        assert decided is not None
        expected = self.all.from_first(mine.policy.digest if mine is not None and mine.policy is not None else "")
        # Recomputed here: the digest that was received was computed on the first rank.
        found = replace(decided.policy).digest if decided.policy is not None else ""
        if not self.all.all(found == expected):
            raise PolicyError(f"the ranks do not have the same Policy: rank {self.all.rank} has {found[:12]}")
        return decided

    def close(self) -> None:
        """Destroy the process groups."""
        if self.stage is not self.all:
            self.stage.close()
        self.all.close()


def _with_seconds(trace: Trace, seconds: Sequence[float]) -> Trace:
    """The Trace with other times, in the order of :func:`~lowtide.trace.trace.kernels_of`; untimed stays untimed."""
    rest = iter(seconds)

    def timed(part: Part) -> Part:
        pairs = zip(part.kernels, rest, strict=False)  # each part takes as many as it has
        kernels = (one if one.seconds is None else one._replace(seconds=slow) for one, slow in pairs)
        return replace(part, kernels=tuple(kernels))

    return trace.changed(timed)

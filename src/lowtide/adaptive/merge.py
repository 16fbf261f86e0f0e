"""One Trace of several: of ranks that do the same, and of the stages of a pipeline. No torch here."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

from lowtide.adaptive.stage_ends import followed, preceded
from lowtide.errors import TraceError
from lowtide.trace.trace import Part, Static, Trace

__all__ = ["Kind", "Merged", "joined", "kind_of", "merge", "slowest", "unmerged"]


class Kind(NamedTuple):
    """What has to be known of every rank's Trace before they are merged."""

    structure: int
    """The same for ranks that run the same kernels, whatever their sizes."""
    held: int
    """Bytes held in a step."""


class Merged(NamedTuple):
    """The Traces of some neighbouring ranks of a stage, as one."""

    trace: Trace | None
    """Of those that run the kernels of the rank that holds most; None if none does."""
    has_largest: bool
    """Whether that rank is among them."""
    ranks: int
    alike: int
    """How many of them run its kernels."""
    notes: tuple[str, ...]

    def result(self) -> Trace:
        """The Trace of all, when all are merged."""
        assert self.trace is not None, "the rank that holds most is among all"
        if self.alike == self.ranks:
            return replace(self.trace, notes=self.notes)
        others = self.ranks - self.alike
        note = f"{others} of {self.ranks} ranks did not run the same kernels: the one that holds most is used for all"
        return replace(self.trace, notes=(*self.notes, note))


def kind_of(trace: Trace) -> Kind:
    """What the other ranks have to know of a Trace."""
    digest = hashlib.blake2b(repr(_structure(trace)).encode(), digest_size=7).digest()
    return Kind(int.from_bytes(digest), _bytes(trace))


def unmerged(trace: Trace, place: int, kinds: Sequence[Kind]) -> Merged:
    """The Trace of one rank, at its place among those of the stage, of which all kinds are known."""
    largest = max(range(len(kinds)), key=lambda one: kinds[one].held)
    alike = kinds[place].structure == kinds[largest].structure
    return Merged(trace if alike else None, place == largest, 1, int(alike), trace.notes)


def merge(first: Merged, second: Merged) -> Merged:
    """Two as one, of ranks in this order: of each kernel the longest time, and the most memory.

    The order of merging does not matter, so ranks can merge in pairs.
    """
    trace = first.trace or second.trace
    if first.trace is not None and second.trace is not None:
        one, two = first.trace, second.trace
        trace = replace(
            two if second.has_largest else one,
            before=_largest((one.before, two.before)),
            parts=tuple(_largest(both) for both in zip(one.parts, two.parts, strict=True)),
            after=_largest((one.after, two.after)),
            optimizer=_largest((one.optimizer, two.optimizer)),
        )
    return Merged(
        trace,
        first.has_largest or second.has_largest,
        first.ranks + second.ranks,
        first.alike + second.alike,
        tuple(dict.fromkeys((*first.notes, *second.notes))),
    )


def slowest(traces: Sequence[Trace]) -> Trace:
    """The Trace of the ranks of one pipeline stage: of each kernel the longest time, and the most memory.

    Ranks whose experts were routed other tokens do not run the same kernels: then the Trace is that of the rank that
    holds most, and has a note about it. Ranks that are apart do the same by :meth:`Agreement.merged`.

    ``trace = slowest(gathered)``
    """
    if not traces:
        raise TraceError("no Traces to merge: give those of all ranks of a stage")
    kinds = [kind_of(one) for one in traces]
    return reduce(merge, (unmerged(one, place, kinds) for place, one in enumerate(traces))).result()


def joined(stages: Sequence[Trace]) -> Trace:
    """The Trace of a whole model from those of its pipeline stages, in the order of the data.

    What runs before the layers is the first stage's, what runs after them the last stage's. What the other stages do
    there is added to their outermost layers: see [Note: stage ends] in :mod:`lowtide.adaptive.stage_ends`.

    ``trace = joined([first, second])``
    """
    if not stages:
        raise TraceError("no Traces to join: give those of all pipeline stages, in the order of the model")
    if len(stages) == 1:
        return stages[0]
    alike: dict[Part, list[Part]] = {}
    layers: list[int] = []
    for number, stage in enumerate(stages):
        own = [stage.parts[part] for part in stage.layers]
        if number > 0:
            own[0] = preceded(own[0], stage.before)
        if number < len(stages) - 1:
            own[-1] = followed(own[-1], stage.after)
        for part in own:
            plain = part.without_seconds()
            alike.setdefault(plain, []).append(part)
            layers.append(list(alike).index(plain))
    return replace(
        stages[0],
        parts=tuple(_largest(parts) for parts in alike.values()),
        layers=tuple(layers),
        after=stages[-1].after,
        optimizer=_whole_optimizer(stages),
        measured=all(stage.measured for stage in stages),
        notes=_notes(stages),
    )


def _whole_optimizer(stages: Sequence[Trace]) -> Part:
    """The step of an optimizer of all parameters: that of the stage with most of them, scaled up.

    The simulator scales it down again, to each stage's share of the parameters' bytes.
    """
    total = sum(_parameters(stage) for stage in stages)
    most = max(stages, key=_parameters)
    times = total / _parameters(most) if _parameters(most) else 1.0
    return most.optimizer.scaled(times)


def _largest(parts: Sequence[Part]) -> Part:
    """One part in place of several alike: as slow as the slowest, and as large as the largest."""
    first = parts[0]
    kernels = []
    for same in zip(*(part.kernels for part in parts), strict=True):
        seconds = [kernel.seconds for kernel in same if kernel.seconds is not None]
        work = max(same, key=lambda kernel: (kernel.flops, kernel.touched))
        kernels.append(work._replace(seconds=max(seconds, default=None)))
    values = (max(same, key=lambda value: value.size) for same in zip(*(part.values for part in parts), strict=True))
    static: Static = max((part.static for part in parts), key=lambda one: one.total)
    return replace(first, values=tuple(values), kernels=tuple(kernels), static=static)


def _structure(trace: Trace) -> tuple[Any, ...]:
    """What ranks that run the same kernels have in common: everything but sizes and times."""
    return (trace.layers, *map(_steps, (trace.before, *trace.parts, trace.after, trace.optimizer)))


def _steps(part: Part) -> tuple[Any, ...]:
    return (
        part.forward, part.backward, tuple(kernel.kind for kernel in part.kernels), len(part.values),
        tuple(pack[:-1] for pack in part.packs), tuple(operator.name for operator in part.operators),
    )  # fmt: skip


def _bytes(trace: Trace) -> int:
    """Bytes held in a step: static memory, and what the layers save for backward."""
    around = trace.before.static.total + trace.after.static.total
    return around + sum(
        trace.parts[part].static.total + sum(operator.owned for operator in trace.parts[part].operators)
        for part in trace.layers
    )


def _parameters(trace: Trace) -> int:
    parts = (trace.before, trace.after, *(trace.parts[part] for part in trace.layers))
    return sum(sum(part.static.parameters) for part in parts)


def _notes(traces: Sequence[Trace]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(note for trace in traces for note in trace.notes))

"""FSDP in a pipeline: what is gathered once, what is added up whole, and reduced at the end.

[Note: FSDP in a pipeline]
A Trace shows one micro-batch: a layer's parameters are gathered before it, and its gradients are reduced after it. In
a pipeline torch has FSDP keep gathered parameters until the step ends, unless they are freed after each forward.
Gradients are not reduced after a backward: they are cast to the type that they are reduced in, and added up whole. When
the last backward has ended, the layers' parameters are freed and their gradients reduced, one layer after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from lowtide.cost.kernel import kernel_seconds
from lowtide.planner.cache import Cache
from lowtide.planner.rank import Rank, Storage, Timed
from lowtide.trace.trace import Event, Kernel, Part, Sync

__all__ = ["Accumulating", "Sharing", "sharing_of"]

Key: TypeAlias = tuple[int | None, str]
"""A part of a stage: its layer and its name."""


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """A part whose parameters ranks share."""

    gathering: Part
    """The part in a micro-batch that gathers."""
    later: Part
    """The part in one that finds the parameters gathered."""
    parameters: frozenset[int]
    """The values that are gathered parameters and stay."""
    gradients: tuple[int, ...]
    """The values that are whole gradients."""
    sizes: tuple[int, ...]
    """What each of them takes in the type that it is reduced in."""
    reduction: tuple[Event, ...]
    """How they are reduced."""


_sharings: Cache[Sharing | None] = Cache(256)


def sharing_of(part: Part) -> Sharing | None:
    """What FSDP does in a part; None where it does nothing."""
    return _sharings.get(part.digest, lambda: _sharing(part))


def _sharing(part: Part) -> Sharing | None:
    forward = [number for what, number in part.forward if what == "run"]
    backward = [number for what, number in part.backward if what == "run"]
    copies_out = [number for number in forward if part.kernels[number].kind == "fsdp::split_with_sizes_copy"]
    copies_in = [number for number in backward if part.kernels[number].kind == "fsdp::chunk_cat"]
    if not copies_in:
        return None
    freed = {number for what, number in part.forward if what == "free"}
    gathered = {value for number in copies_out for value in part.kernels[number].writes} - freed
    gathers = {number for number in forward if part.kernels[number].stream} if gathered else set()
    buffers = {value for number in gathers for value in part.kernels[number].writes} | {*part.taken}
    reduced = {value for number in copies_in for value in part.kernels[number].writes}
    gradients = tuple(
        dict.fromkeys(value for number in copies_in for value in part.kernels[number].reads if value not in reduced)
    )
    reductions = {number for number in backward if part.kernels[number].stream} | {*copies_in}
    made = {value for number in reductions for value in part.kernels[number].writes} | {*part.taken_back}

    def without(events: tuple[Event, ...], kernels: set[int], values: set[int], freed: set[int]) -> tuple[Event, ...]:
        return tuple(
            (what, number)
            for what, number in events
            if not (what == "run" and number in kernels)
            and not (what in ("make", "free") and number in values)
            and not (what == "free" and number in freed)
        )

    accumulated = without(part.backward, reductions, made, gathered | {*gradients})
    gathering = later = replace(part, backward=accumulated)
    if gathered:
        later = replace(later, forward=without(part.forward, {*gathers, *copies_out}, buffers | gathered, set()))
    total = sum(part.values[value].size for value in gradients)
    ratio = sum(part.values[value].size for value in reduced) / total if total else 1.0
    return Sharing(
        gathering=gathering,
        later=later,
        parameters=frozenset(gathered),
        gradients=gradients,
        sizes=tuple(part.values[value].size * (2 if ratio > 1.5 else 1) for value in gradients),
        reduction=tuple(
            (what, number)
            for what, number in part.backward
            if (what == "run" and number in reductions) or (what == "make" and number in made)
        ),
    )


class Accumulating:
    """What a stage holds of gathered parameters and whole gradients."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.parameters: dict[Key, list[Storage]] = {}
        self.gradients: dict[Key, list[Storage]] = {}
        self.order: dict[Key, Sharing] = {}
        """The parts that have gradients, in the order in which they are reduced."""

    def keep(self, key: Key, sharing: Sharing, slots: dict[int, Storage]) -> None:
        """A forward has gathered parameters: they stay."""
        found = [slots.pop(number) for number in sorted(sharing.parameters) if number in slots]
        self.parameters.setdefault(key, []).extend(found)

    def add(self, key: Key, sharing: Sharing, slots: dict[int, Storage]) -> None:
        """A backward has made whole gradients: they are added to those that are there."""
        sizes = zip(sharing.gradients, sharing.sizes, strict=True)
        whole = [(slots.pop(number), size) for number, size in sizes if number in slots]
        there = self.gradients.get(key)
        self.order.setdefault(key, sharing)
        if there is None:
            self.gradients[key] = []
        for storage, size in whole:
            if there is not None:
                self._run("aten::add_", storage.size + 2 * size)
                self.rank.drop(storage)
                continue
            kept = storage
            if size != storage.size:
                kept = self.rank.make(size)
                self._run("aten::_to_copy", storage.size + size)
                self.rank.drop(storage)
            kept.what = "gradients"
            self.gradients[key].append(kept)

    def reduce(self) -> None:
        """The last backward has ended."""
        rank, before = self.rank, None
        for key, sharing in self.order.items():
            part, timed = sharing.gathering, rank.timed(sharing.gathering)
            rank.drop_all(self.parameters.pop(key, []))
            made: dict[int, Storage] = {}
            for what, number in sharing.reduction:
                if what == "make":
                    made[number] = rank.make(part.values[number].size)
                    continue
                if timed[number].stream:
                    rank.lanes.sync(Sync(timed[number].stream, other=0))
                rank.run(timed[number])
                if part.kernels[number].kind == "fsdp::chunk_cat":
                    rank.drop_all(self.gradients.pop(key, []))
            if before is not None:
                rank.drop_all(before)
            before = [storage for number, storage in made.items() if not part.values[number].gradient]
        rank.drop_all(before or ())
        for stream in list(rank.lanes.streams):
            rank.lanes.sync(Sync(0, other=stream))
        for found in self.parameters.values():
            rank.drop_all(found)
        self.parameters, self.order = {}, {}

    def _run(self, kind: str, touched: int) -> None:
        self.rank.run(Timed(kernel_seconds(self.rank.device, Kernel(kind, touched=touched))))

"""Weights that autocast has cast, where one cast serves all micro-batches of a step.

Autocast keeps a weight's cast until its context ends. Around one forward, that is the micro-batch's own affair, and the
Trace shows it. A pipeline runs all micro-batches inside one context: the casts are made with the first, found by all
others and by every layer that is recomputed, and there until the step's last backward has ended.

[Note: late gradients]
Autograd runs first what was recorded last. The nodes that cast weights were recorded in the first micro-batch. In the
backward of any other they come after all its other nodes: until then the gradients of the casts are held, of all layers
of the stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from lowtide.planner.rank import Rank, Storage
from lowtide.trace.trace import Part

__all__ = ["CastCache", "cast_gradients", "cast_weights", "without_casts"]


class CastCache:
    """What autocast has cast and holds, by layer, where it does so for all micro-batches."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.shared = False
        """Whether one cast serves all micro-batches."""
        self.held: dict[tuple[int | None, str], dict[int, Storage]] = {}

    def fill(self, parts: Iterable[tuple[int | None, Part]]) -> None:
        """A forward casts the weights that are not cast; ``parts`` are those of its chunk, each with its layer."""
        for layer, part in parts if self.shared else ():
            if (layer, part.name) in self.held:
                continue
            timed, casts = self.rank.timed(part), cast_weights(part)
            found = self.held[layer, part.name] = {}
            for number, kernel in enumerate(part.kernels):
                for value in casts.intersection(kernel.writes):
                    storage = self.rank.make(part.values[value].size)
                    storage.what, storage.layer, storage.operator = "parameters", layer, part.values[value].owner
                    found[value] = storage
                    self.rank.run(timed[number])

    def of(self, layer: int | None, part: Part) -> Mapping[int, Storage] | None:
        """The casts of a part's weights, by value; None if they are not there."""
        return self.held.get((layer, part.name))

    def clear(self) -> None:
        """Autocast drops what it holds."""
        for found in self.held.values():
            self.rank.drop_all(found.values())
        self.held = {}


def cast_weights(part: Part) -> frozenset[int]:
    """The values that are casts of weights: made from nothing that the part was given or made, saved, and left behind.

    A model that casts a weight itself frees the cast in the same layer. What runs after the layers ends with autocast's
    context: there the two look the same, and are taken for autocast's.
    """
    saved = {pack.value for pack in part.packs}
    return frozenset(
        value
        for kernel in part.kernels
        if kernel.kind == "aten::_to_copy" and not kernel.reads
        for value in kernel.writes
        if value in saved and (part.values[value].until or value in part.handed or part.name == "after")
    )


def without_casts(part: Part) -> Part:
    """The part in a micro-batch that finds its weights cast."""
    casts = cast_weights(part)
    if not casts:
        return part
    made = {number for number, kernel in enumerate(part.kernels) if casts.intersection(kernel.writes)}
    gone = {
        *(("make", value) for value in casts),
        *(("free", value) for value in casts),
        *(("run", number) for number in made),
    }
    return replace(
        part,
        forward=tuple(event for event in part.forward if event not in gone),
        backward=tuple(event for event in part.backward if event not in gone),
    )


def cast_gradients(part: Part) -> dict[int, tuple[int, int]]:
    """The kernels that cast the gradients of cast weights, each with what it reads and the gradient that it makes.

    A weight that the model casts itself is cast in every micro-batch, and so is its gradient.
    """
    casts = cast_weights(part)
    casting = {kernel.operator for kernel in part.kernels if casts.intersection(kernel.writes)}
    return {
        number: (kernel.reads[0], kernel.writes[0])
        for number, kernel in enumerate(part.kernels)
        if kernel.kind == "aten::_to_copy"
        and kernel.operator in casting
        and len(kernel.reads) == len(kernel.writes) == 1
        and part.values[kernel.writes[0]].gradient
    }

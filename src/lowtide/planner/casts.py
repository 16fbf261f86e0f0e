"""Weights that autocast has cast, where one cast serves all micro-batches of a step.

Autocast keeps a weight's cast until its context ends. Around one forward, that is the micro-batch's own affair, and the
Trace shows it. A pipeline runs all micro-batches inside one context: the casts are made with the first, found by all
others and by every layer that is recomputed, and there until the step's last backward has ended.
"""

from __future__ import annotations

from dataclasses import replace

from lowtide.trace.trace import Part

__all__ = ["cast_weights", "without_casts"]


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

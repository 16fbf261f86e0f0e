"""Models with several stacks of layers, such as an encoder and a decoder: a Trace has the layers of one of them."""

from __future__ import annotations

from collections.abc import Iterable

from lowtide.operators.calls import collapse
from lowtide.operators.layers import Layers
from lowtide.trace.trace import Trace
from lowtide.units import format_bytes

__all__ = ["is_uncovered", "uncovered_notes"]

_START = "not covered: "
LEAST = 0.02
"""A stack that holds less than this share of what the covered layers hold is not worth a word."""


def uncovered_notes(covered: Layers, others: Iterable[Layers], trace: Trace) -> tuple[str, ...]:
    """A sentence for each of the ``others`` that the Trace has outside its layers, where all is kept."""
    covered_bytes = sum(operator.owned for part in trace.layers for operator in trace.parts[part].operators)
    owned = {operator.name: operator.owned for part in (trace.before, trace.after) for operator in part.operators}
    notes = []
    for stack in others:
        inside = tuple(f"{collapse(name)}." for name in stack.names)
        size = sum(held for name, held in owned.items() if name.startswith(inside))
        if size > LEAST * covered_bytes:
            notes.append(
                f"{_START}the {len(stack.modules)} layers in {stack.path or 'the model'}"
                f" ({type(stack.modules[0]).__name__}) hold {format_bytes(size)} for backward, and all of it is kept;"
                f" the plan is for the {len(covered.modules)} in {covered.path or 'the model'}, layers={stack.path!r}"
                " plans for these instead"
            )
    return tuple(notes)


def is_uncovered(note: str) -> bool:
    """Whether a note of a Trace is one of :func:`uncovered_notes`."""
    return note.startswith(_START)

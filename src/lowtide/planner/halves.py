"""A backward in two halves, as zero-bubble schedules run it: the gradient of the input, then those of the parameters.

[Note: two halves]
Torch runs two backwards over one graph. The first computes the gradient of a chunk's input and keeps the graph. It
also notes the gradients that nodes with parameters were given. The second runs those nodes again, for their parameters
alone. So between the halves the device holds those gradients, the input's gradient, and all that was kept. Of what was
recomputed or reloaded it holds only what those nodes need
(see [Note: a backward in two halves] in :mod:`lowtide.operators.saved`). A node without parameters frees nothing until
the graph is dropped, after the second half, unless it comes after the last parameter: the head's loss.

The first chunk's input needs no gradient. All its backward runs where the second half would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.planner.codes import ADD, DONE, FREE, HOLD, MAKE, RETAIN, RUN, SYNC, UNPACKED, USE, Code
from lowtide.trace.trace import Part

__all__ = ["Halves", "halves_of"]


@dataclass(frozen=True, kw_only=True)
class Halves:
    """A part's backward in two halves."""

    first: tuple[Code, ...]
    """What computes the gradient of the input. ``HOLD`` is where a kernel of the second half would have run: what
    that reads is held for it."""
    second: tuple[Code, ...]
    """What computes the gradients of the parameters."""
    above: tuple[int, ...]
    """The saved tensors of the nodes that come after the last parameter."""
    left: tuple[int, ...]
    """Those that no half is done with: they go with the graph."""


def halves_of(part: Part, codes: Sequence[Code]) -> Halves:
    """Split ``codes``, which are a backward of ``part``."""
    inputs = _kernels_for_input(part)
    gradients = {number for number, value in enumerate(part.values) if value.gradient}
    weights = {
        number
        for what, number in part.backward
        if what == "run" and (number not in inputs or gradients.intersection(part.kernels[number].writes))
    }
    early = {value for number in inputs for value in part.kernels[number].writes} - gradients
    late = {value for number in weights for value in part.kernels[number].writes} - early
    again, only, above = _packs(part, inputs, weights)
    first: list[Code] = []
    second: list[Code] = []
    for code, number in codes:
        if code == RUN:
            if number in weights:
                first.append((HOLD, number))
                second.append((RUN, number))
            if number in inputs:
                first.append((RUN, number))
        elif code in (MAKE, FREE):
            (second if number in late else first).append((code, number))
        elif code == ADD:
            second.append((code, number))
        elif code == USE:
            (second if number in only else first).append((code, number))
            if number in again:
                first.append((RETAIN, number))
        elif code == DONE and (number in again or number in only):
            second.append((code, number))
        elif code == DONE:
            first.append((UNPACKED, number))
        elif code == SYNC:
            first.append((code, number))
            second.append((code, number))
    left = tuple(number for code, number in first if code == UNPACKED)
    return Halves(first=tuple(first), second=tuple(second), above=above, left=left)


def _kernels_for_input(part: Part) -> set[int]:
    """The kernels that the gradient of the part's input follows from."""
    needed = {*part.handed_back} if part.input_gradient is None else {part.input_gradient, *part.handed_back}
    found: set[int] = set()
    for what, number in reversed(part.backward):
        if what == "run" and needed.intersection(part.kernels[number].writes):
            found.add(number)
            needed.update(part.kernels[number].reads)
    return found


def _packs(part: Part, inputs: set[int], weights: set[int]) -> tuple[frozenset[int], frozenset[int], tuple[int, ...]]:
    """The saved tensors that nodes of both halves need, those that only the second needs, and those that are freed
    with the first."""
    running: set[int] = set()
    by_input: set[int] = set()
    by_weight: set[int] = set()
    above: list[int] = []
    for what, number in part.backward:
        if what == "use":
            running.add(number)
        elif what == "done":
            running.discard(number)
            if not by_weight:
                above.append(number)
        elif what == "run":
            if number in inputs:
                by_input |= running
            if number in weights:
                by_weight |= running
    return frozenset(by_weight & by_input), frozenset(by_weight - by_input), tuple(above)

"""What a pipeline stage does around its layers, added to its first layer and to its last. No torch here.

[Note: stage ends]
A Trace of the whole model has a part before its first layer and a part after its last, and nothing between layers. A
stage in the middle of a pipeline may do something there: FSDP gathers the parameters outside the layers before the
first layer runs, and keeps them until backward has ended. This is added to the stage's outermost layers. It is not one
of their operators: nothing is decided for it, and no checkpoint recomputes it. What it saves for backward stays until
backward has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lowtide.trace.trace import Event, Kernel, Part, Static, Value

__all__ = ["followed", "preceded"]


def preceded(layer: Part, before: Part) -> Part:
    """The first layer of a stage, with what the stage does before it."""
    if not _does_anything(before):
        return layer
    pairs = [
        (before.output, layer.input),
        (before.output_gradient, layer.input_gradient),
        *zip(before.handed, layer.taken, strict=False),
        *zip(before.taken_back, layer.handed_back, strict=False),
    ]
    end = _End(layer, before, pairs, given=(before.output, before.output_gradient))
    return end.added(
        forward=(*end.events(before.forward), *layer.forward),
        backward=(*layer.backward, *end.events(before.backward)),
        taken=layer.taken[len(before.handed) :],
        handed_back=layer.handed_back[len(before.taken_back) :],
    )


def followed(layer: Part, after: Part) -> Part:
    """The last layer of a stage, with what the stage does after it."""
    if not _does_anything(after):
        return layer
    pairs = [
        (after.input, layer.output),
        (after.input_gradient, layer.output_gradient),
        *zip(after.taken, layer.handed, strict=False),
        *zip(after.handed_back, layer.taken_back, strict=False),
    ]
    end = _End(layer, after, pairs, given=(after.input, after.input_gradient))
    return end.added(
        forward=(*layer.forward, *end.events(after.forward)),
        backward=(*end.events(after.backward), *layer.backward),
        handed=layer.handed[len(after.taken) :],
        taken_back=layer.taken_back[len(after.handed_back) :],
    )


def _does_anything(end: Part) -> bool:
    return bool(end.kernels or sum(end.static.parameters))


class _End:
    """An end of a stage, with its storages and kernels numbered behind the layer's."""

    def __init__(
        self, layer: Part, end: Part, pairs: Sequence[tuple[int | None, int | None]], given: Sequence[int | None]
    ) -> None:
        self.layer, self.end = layer, end
        self.given = frozenset(given) - {None}
        """What the stage receives or sends: the pipeline holds it, so no event here frees it."""
        shared = {own: theirs for own, theirs in pairs if own is not None and theirs is not None}
        rest = [number for number in range(len(end.values)) if number not in shared]
        self.numbers = shared | {number: len(layer.values) + index for index, number in enumerate(rest)}
        self.saved = {pack.value for pack in end.packs} - {-1}

    def events(self, events: Sequence[Event]) -> tuple[Event, ...]:
        """Its events with the new numbers, without calls and saved tensors."""
        result: list[Event] = []
        for what, number in events:
            if what == "run":
                result.append((what, len(self.layer.kernels) + number))
            elif (what == "make" or (what == "free" and number not in self.saved)) and number not in self.given:
                result.append((what, self.numbers[number]))
        return tuple(result)

    def added(self, **changed: tuple[Event, ...] | tuple[int, ...]) -> Part:
        """The layer with the storages and kernels of this end."""
        layer, end = self.layer, self.end
        own = {new: end.values[old] for old, new in self.numbers.items() if new >= len(layer.values)}
        saved = {self.numbers[number] for number in self.saved}
        values = (_foreign(value, held=new in saved) for new, value in sorted(own.items()))
        return replace(
            layer,
            values=(*layer.values, *values),
            kernels=(*layer.kernels, *map(self._kernel, end.kernels)),
            static=Static(*(mine + theirs for mine, theirs in zip(layer.static, _of_its_own(end.static), strict=True))),
            **changed,  # type: ignore[arg-type]
        )

    def _kernel(self, kernel: Kernel) -> Kernel:
        reads, writes = (tuple(self.numbers[one] for one in some) for some in (kernel.reads, kernel.writes))
        return kernel._replace(operator="", reads=reads, writes=writes)


def _foreign(value: Value, *, held: bool) -> Value:
    return value._replace(owner="", source="root", until="backward" if held else value.until)


def _of_its_own(static: Static) -> Static:
    """Without buffers: a simulated stage has the first stage's already, the position tables."""
    return static._replace(buffers=())

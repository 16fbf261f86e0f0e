"""The Trace: what one rank of a model does and holds in one micro-batch, as plain data in a file.

A model is cut into parts: what runs before the layers, the layers, and what runs after them, the loss included. Layers
that do exactly the same share one part. A part is two streams of events, one of its forward and one of its backward,
over kernels, storages and tensors saved for backward. So everything that comes later, from a solver to a picture, works
without the model and without a device.

[Note: events]
An event is a pair ``(what, number)``; the number is an index into one of the part's tuples.

==========  ============  ==============================================================================
what        the number    meaning
==========  ============  ==============================================================================
``call``    ``calls``     a call of an operator begins (forward only)
``end``     ``calls``     the call has ended
``make``    ``values``    a storage is allocated; one that was freed may be made again
``run``     ``kernels``   a kernel runs; what it writes has been made before
``free``    ``values``    nothing of the program holds the storage any more. In forward: apart from autograd, as if
                          nothing were saved for backward
``save``    ``packs``     autograd saves a tensor (forward only)
``use``     ``packs``     autograd unpacks a saved tensor (backward only)
``done``    ``packs``     autograd frees it (backward only)
``sync``    ``syncs``     a stream records an event, or waits for one, for a collective or for another stream
==========  ============  ==============================================================================

A storage that is saved and kept is free when the program no longer holds it and every pack of it is done.

Storages cross from part to part in four places, which a part names: its ``input`` is the output of the part before and
its ``output`` the input of the next; its ``output_gradient`` comes from the part that runs before it in backward, and
its ``input_gradient`` goes to the next there; both are one value where a gradient passes through. A given storage is
freed where the events say, by the part that was given it. So are those in ``taken`` and ``handed``. Others that are
made in one part and used in another, such as rotary tables, say with ``Value.until`` how long they live; parts that
save them do so with packs whose ``value`` is -1.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from lowtide.errors import PlanError, TraceError
from lowtide.planner.pipeline import Pipeline
from lowtide.policy import Catalogue, Operator
from lowtide.trace.layout import Layout

__all__ = [
    "READ_BY_HOST",
    "Call",
    "Event",
    "Kernel",
    "Pack",
    "Part",
    "Source",
    "Static",
    "Sync",
    "Trace",
    "TracedOperator",
    "Value",
    "What",
    "kernels_of",
]

FORMAT = 1

READ_BY_HOST = "lowtide::read_by_host"
"""A kernel of a Trace: the host reads a tensor's values, and waits for them."""

Source: TypeAlias = Literal["operator", "boundary", "root", "static"]
"""Whose value a tensor is: an operator's of the part, the part's input, something from outside, or a parameter's."""
What: TypeAlias = Literal["call", "end", "make", "run", "free", "save", "use", "done", "sync"]
Event: TypeAlias = tuple[What, int]
"""See [Note: events]."""


class TracedOperator(NamedTuple):
    """An operator of a part."""

    name: str
    """Its dotted path inside the layer; in the parts around the layers, inside the model."""
    owned: int = 0
    """The bytes of the tensors saved for backward that it wrote last, each storage once."""
    net: int = 0
    """What recomputing it alone would save: ``owned`` less inputs that would be held only for the replay."""
    random: bool = False
    """Whether it draws random numbers."""
    repeatable: bool = True
    """Whether its call can be replayed."""
    consumers: tuple[str, ...] = ()
    """The operators that read its value."""
    aliases: tuple[str, ...] = ()
    """Other names that users of the guides know it by."""


class Value(NamedTuple):
    """A storage."""

    size: int
    """Its bytes."""
    owner: str = ""
    """The operator that wrote it last, views and casts looked through; empty if none of the part did."""
    source: Source = "operator"
    """Whose value it is."""
    gradient: bool = False
    """Whether it becomes a parameter's gradient, which outlives the micro-batch. In the second and later micro-batches
    of a step it is added to the one that is there and freed at once."""
    until: Literal["", "forward", "backward"] = ""
    """For what is made in forward and freed outside of the part: when the whole forward, or the whole backward, of the
    micro-batch has ended. Rotary tables are such, and weights that autocast has cast."""


class Kernel(NamedTuple):
    """One kernel, as it is issued to the device."""

    kind: str
    """Its name: ``aten::mm``, ``c10d::allgather_``."""
    operator: str = ""
    """The operator that it belongs to; in backward, the one whose gradient it computes."""
    dtype: str = "float32"
    """What it computes in."""
    flops: int = 0
    """Floating-point operations, where they can bound it: matrix products, attention, convolution."""
    touched: int = 0
    """Bytes read and written."""
    shape: str = ""
    """What it was given, in short: kernels of one kind and shape take the same time."""
    reads: tuple[int, ...] = ()
    """The storages it reads."""
    writes: tuple[int, ...] = ()
    """The storages it writes."""
    ranks: int = 0
    """For a collective, how many ranks take part; otherwise 0."""
    message: int = 0
    """For a collective, the bytes of this rank's full buffer: the gathered, reduced or exchanged one."""
    seconds: float | None = None
    """How long it took, if it was measured."""
    stride: int = 1
    """For a collective, how far apart neighbouring ranks of its group are: 8 for ranks 0, 8, 16."""
    stream: int = 0
    """The stream that it is issued on: 0 for the one that computes."""
    waited: bool = True
    """For a collective, whether its stream waits for it at once; else a ``sync`` event says where."""


class Sync(NamedTuple):
    """Something that streams do with each other."""

    stream: int
    """The stream that does it."""
    channel: str = ""
    """Of an event, by the place in the program where it is recorded; or the group of a collective."""
    other: int = -1
    """The stream that is waited for, all of it; -1 if it is an event."""
    waits: bool = True
    """Whether the stream waits; else it records the event."""


class Call(NamedTuple):
    """One call of an operator in forward."""

    operator: str
    """Its name."""
    inputs: tuple[int, ...] = ()
    """The storages that it was given, parameters aside."""
    reads: tuple[str, ...] = ()
    """The operators whose values those are."""


class Pack(NamedTuple):
    """A tensor that autograd saves."""

    value: int
    """Its storage; -1 for one of another part, or a parameter's."""
    operator: str
    """The operator that saves it."""
    owner: str
    """The operator whose decision it follows; empty unless ``source`` is ``operator``."""
    source: Source
    position: int
    """The index of the saving operator among the part's operators: what a prefetch counts in."""
    movable: bool = True
    """False for integers and booleans, which are always kept."""
    cast: bool = False
    """Whether it is a cast of the owner's value."""


class Static(NamedTuple):
    """What stays allocated over the step: the size of each storage."""

    parameters: tuple[int, ...] = ()
    buffers: tuple[int, ...] = ()
    """Of what comes before the layers, also the batch."""
    gradients: tuple[int, ...] = ()
    optimizer: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """All of it."""
        return sum(map(sum, self))


@dataclass(frozen=True, kw_only=True)
class Part:
    """A layer, or what runs before or after the layers."""

    name: str
    """The layer's class, or ``before`` or ``after``."""
    operators: tuple[TracedOperator, ...] = ()
    """In the order they first ran."""
    values: tuple[Value, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    calls: tuple[Call, ...] = ()
    packs: tuple[Pack, ...] = ()
    """In the order they were saved."""
    syncs: tuple[Sync, ...] = ()
    """What streams wait for; empty where there is one."""
    forward: tuple[Event, ...] = ()
    backward: tuple[Event, ...] = ()
    input: int | None = None
    """The value that the part before made."""
    output: int | None = None
    output_gradient: int | None = None
    """The value that the part before it in backward made."""
    input_gradient: int | None = None
    taken: tuple[int, ...] = ()
    """Other values that the part before it in forward made and this one frees: buffers of gathered parameters."""
    handed: tuple[int, ...] = ()
    """Those that it hands to the next, which takes them in the same order."""
    taken_back: tuple[int, ...] = ()
    """As ``taken``, in backward."""
    handed_back: tuple[int, ...] = ()
    """As ``handed``, in backward."""
    across: tuple[int, ...] = ()
    """Values that ``before`` makes and ``after`` frees in forward, in the same order in both. Where a pipeline parts
    the two, ``Value.until`` holds."""
    frees_at: int | None = None
    """In ``after``: how many of its forward events come before the layers' values that live until the end of forward
    are freed, such as weights that autocast has cast."""
    result: int | None = None
    """In ``after``: the model's own output, the logits, where the loss is computed from it. A pipeline's last stage
    holds it until backward."""
    static: Static = field(default_factory=Static)

    @cached_property
    def digest(self) -> str:
        """A stable name of the content."""
        return hashlib.sha256(json.dumps(_as_json(self), sort_keys=True).encode()).hexdigest()[:12]

    @cached_property
    def catalogue(self) -> tuple[Operator, ...]:
        """The operators as a Policy is resolved against them."""
        return tuple(Operator(one.name, one.consumers, one.aliases) for one in self.operators)

    def without_seconds(self) -> Part:
        """The same as if nothing had been timed."""
        return replace(self, kernels=tuple(kernel._replace(seconds=None) for kernel in self.kernels))

    def scaled(self, share: float) -> Part:
        """The same with so much of its bytes and seconds: an optimizer's step for that share of the parameters."""
        return replace(
            self,
            values=tuple(value._replace(size=int(value.size * share)) for value in self.values),
            kernels=tuple(
                kernel._replace(
                    touched=int(kernel.touched * share),
                    shape=f"{share:.4g} of {kernel.shape}",  # what was measured of the whole is not its time
                    seconds=kernel.seconds * share if kernel.seconds is not None else None,
                )
                for kernel in self.kernels
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What one rank of a model does and holds in one micro-batch."""

    model: str
    """What was traced, for people: ``llama3-8b``."""
    parts: tuple[Part, ...]
    """The distinct layers."""
    layers: tuple[int, ...]
    """For each layer of the model, the index of its part."""
    before: Part
    """What runs before the layers."""
    after: Part
    """What runs after them, the loss included."""
    optimizer: Part = field(default_factory=lambda: Part(name="optimizer"))
    """The optimizer's step, in its ``forward``: what it needs in addition to its states."""
    layout: Layout | None = None
    """The ranks that it was traced for, with one pipeline stage: stages are the planner's. None where not known."""
    pipeline: Pipeline | None = None
    """The stages and micro-batches that a plan of it is for, unless others are asked for; None for one of each."""
    dtype: str = ""
    """What most parameters are stored in."""
    optimizer_name: str = ""
    """Whose states and step these are: ``AdamW``."""
    batch: Mapping[str, int] = field(default_factory=dict)
    """``samples`` and ``tokens`` of a micro-batch."""
    device: str = "cpu"
    """Whose kernels these are."""
    measured: bool = False
    """Whether the kernels' seconds were measured."""
    notes: tuple[str, ...] = ()
    """What the trace assumes."""
    frees_boundaries: bool = False
    """Whether this torch's pipeline stages allocate a receive buffer when they receive and free an output when it is
    sent, as they do since 2.15; before that, buffers live as long as the stage and outputs until their backward."""

    @property
    def catalogue(self) -> Catalogue:
        """The operators of every layer."""
        return Catalogue(tuple(self.parts[place].catalogue for place in self.layers))

    @cached_property
    def digest(self) -> str:
        """A stable name of the content."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:12]

    def without_seconds(self) -> Trace:
        """The same as if nothing had been timed: a device's table then says how long a kernel takes."""
        return replace(self.changed(Part.without_seconds), measured=False)

    def changed(self, change: Callable[[Part], Part]) -> Trace:
        """The same with every part changed, in the order of :func:`kernels_of`."""
        before, parts = change(self.before), tuple(map(change, self.parts))
        return replace(self, before=before, parts=parts, after=change(self.after), optimizer=change(self.optimizer))

    def as_json(self) -> dict[str, Any]:
        """The Trace as plain JSON values."""
        value = {one.name: _plain(getattr(self, one.name)) for one in fields(self)}
        return {"lowtide_trace": FORMAT, **value, "layout": self.layout.as_json() if self.layout is not None else {}}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Trace:
        """The reverse of :meth:`as_json`; TraceError where it is something else."""
        if not isinstance(value, Mapping) or value.get("lowtide_trace") != FORMAT:
            raise TraceError(
                f'not a Trace: expected an object with "lowtide_trace": {FORMAT}, as --trace-out writes it'
            )
        try:
            return Trace(
                model=value["model"],
                parts=tuple(map(_part, value["parts"])),
                layers=tuple(value["layers"]),
                before=_part(value["before"]),
                after=_part(value["after"]),
                optimizer=_part(value["optimizer"]),
                layout=Layout.from_json(value["layout"]),
                pipeline=_pipeline(value.get("pipeline")),
                dtype=value.get("dtype", ""),
                optimizer_name=value.get("optimizer_name", ""),
                batch=dict(value["batch"]),
                device=value["device"],
                measured=value["measured"],
                notes=tuple(value["notes"]),
                frees_boundaries=bool(value.get("frees_boundaries", False)),
            )
        except (KeyError, PlanError, TypeError, ValueError) as error:
            raise TraceError(f"not a Trace: {type(error).__name__}: {error}") from None

    def save(self, file: str | Path) -> None:
        """Write the Trace into a file."""
        Path(file).write_text(json.dumps(self.as_json(), separators=(",", ":")) + "\n")

    @staticmethod
    def load(file: str | Path) -> Trace:
        """Read what :meth:`save` wrote."""
        try:
            value = json.loads(Path(file).read_text())
        except OSError as error:
            raise TraceError(f"{file}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{file} is not a Trace: {error}") from None
        try:
            return Trace.from_json(value)
        except TraceError as error:
            raise TraceError(f"{file}: {error}") from None


def kernels_of(trace: Trace) -> list[Kernel]:
    """The kernels of all parts, of the optimizer's step too; those of layers that do the same once."""
    parts = (trace.before, *trace.parts, trace.after, trace.optimizer)
    return [kernel for part in parts for kernel in part.kernels]


_TUPLES: dict[str, Any] = {
    "operators": TracedOperator, "values": Value, "kernels": Kernel, "calls": Call, "packs": Pack, "syncs": Sync,
}  # fmt: skip


def _plain(value: Any) -> Any:
    if isinstance(value, Part):
        return _as_json(value)
    if isinstance(value, Pipeline):
        return value.as_json()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    return value


def _as_json(part: Part) -> dict[str, Any]:
    return {one.name: _plain(getattr(part, one.name)) for one in fields(part)}


def _pipeline(value: Mapping[str, Any] | None) -> Pipeline | None:
    return Pipeline.from_json(value) if value is not None else None


def _part(value: Mapping[str, Any]) -> Part:
    known = {one.name for one in fields(Part)}
    if unknown := set(value) - known:
        raise TraceError(f"a part has {', '.join(sorted(known))}; found also {', '.join(sorted(unknown))}")
    given: dict[str, Any] = dict(value)
    for name, row in _TUPLES.items():
        rows = value.get(name, ()) if name == "syncs" else value[name]
        given[name] = tuple(row(*_rows(one)) for one in rows)
    for name in ("forward", "backward"):
        given[name] = tuple((what, number) for what, number in value[name])
    for name in ("taken", "handed", "taken_back", "handed_back", "across"):
        given[name] = tuple(value.get(name, ()))
    given["static"] = Static(*(tuple(sizes) for sizes in value["static"]))
    return Part(**given)


def _rows(row: Iterable[Any]) -> list[Any]:
    return [tuple(one) if isinstance(one, list) else one for one in row]

"""Cut a recording into parts, and write them with numbers of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowtide._torch_private.storages import storage_bytes, storage_key
from lowtide.operators import observation
from lowtide.operators.calls import tensors_of
from lowtide.operators.families import aliases_of
from lowtide.operators.kinds import LayerKind
from lowtide.operators.survey import Survey
from lowtide.trace.layout import Layout
from lowtide.trace.recorder import Place, Recorder
from lowtide.trace.trace import Call, Event, Kernel, Pack, Part, Static, Trace, TracedOperator, Value

__all__ = ["assemble"]


def assemble(
    found: Survey,
    forward: Recorder,
    backward: Recorder,
    *,
    seconds: Sequence[float] | None,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    name: str,
    layout: Layout | None,
    batch: Mapping[str, int],
) -> Trace:
    """The Trace of a recording; ``forward`` and ``backward`` are one, or two runs that did the same."""
    states = {parameter: state for optimizer in optimizers for parameter, state in optimizer.state.items()}
    count = len(found.kind_of)
    cut = _Cut(forward, backward, seconds, count)
    parts: dict[Part, list[Part]] = {}
    layers: list[int] = []
    claimed: set[int] = set()
    for index, (module, kind) in enumerate(zip(found.layers.modules, found.kind_of, strict=True)):
        static = _static(module, states, claimed)
        part = cut.part(index, found.kinds[kind].name, found.kinds[kind], static)
        plain = part.without_seconds()
        parts.setdefault(plain, []).append(part)
        layers.append(list(parts).index(plain))
    # What is outside the layers belongs to the part before them; only the head's own parameters belong after.
    behind = _static_behind(model, found, states, claimed)
    held = _static(model, states, claimed)
    held = held._replace(buffers=(*held.buffers, *backward.given.values()))
    before = cut.part(-1, "before", found.root, held)
    after = cut.part(count, "after", found.root, behind)
    return Trace(
        model=name,
        parts=tuple(map(_typical, parts.values())),
        layers=tuple(layers),
        before=before,
        after=after,
        optimizer=cut.optimizer(),
        layout=layout,
        batch=batch,
        dtype=_dtype(model),
        optimizer_name=" and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers)),
        device=backward.device,
        measured=seconds is not None,
        frees_boundaries=torch.__version__ >= "2.15",
    )


def _dtype(model: nn.Module) -> str:
    """What most parameters are stored in."""
    sizes = Counter[str]()
    for parameter in model.parameters():
        sizes[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return max(sizes, key=lambda dtype: sizes[dtype], default="")


def _typical(parts: Sequence[Part]) -> Part:
    """Layers that do the same as one; of each kernel the median time."""
    first = parts[0]
    kernels = []
    for same in zip(*(part.kernels for part in parts), strict=True):
        seconds = [kernel.seconds for kernel in same if kernel.seconds is not None]
        kernels.append(same[0]._replace(seconds=median(seconds) if seconds else None))
    return replace(first, kernels=tuple(kernels))


class _Cut:
    """A recording, and where each storage begins and ends in it."""

    def __init__(self, forward: Recorder, backward: Recorder, seconds: Sequence[float] | None, count: int) -> None:
        self.recorded = backward
        self.seconds, self.count = seconds, count
        self.streams: dict[Place, list[Event]] = {
            place: events for place, events in forward.streams.items() if place[0] == "forward"
        }
        released = {
            number for events in self.streams.values() for what, number in events if what == "free"
        }  # by the program, whatever autograd holds
        self.streams |= {
            place: [event for event in events if forward is backward or event[0] != "free" or event[1] not in released]
            for place, events in backward.streams.items()
            if place[0] != "forward"
        }
        self.ends: dict[int, Place] = {}
        for place, events in self.streams.items():
            for what, number in events:
                if what == "free" and (place[0] == "optimizer") == (backward.storages[number].made[0] == "optimizer"):
                    self.ends[number] = place  # what outlives backward has no end
        saved_in: dict[int, set[int]] = {}
        for number, place, _, _ in backward.saved:
            saved_in.setdefault(number, set()).add(place[1])
        self.saved_in = saved_in
        self.handed: dict[Place, list[int]] = {}
        """What each part hands to the next in addition to its output in forward, or its gradient in backward."""
        for number, storage in enumerate(backward.storages):
            phase, part = storage.made
            following = part + 1 if phase == "forward" else part - 1
            passed = backward.passed.get(part, -1) if phase == "forward" else backward.passed_back.get(part - 1, -1)
            if number != passed and self.ends.get(number) == (phase, following):
                self.handed.setdefault((phase, part), []).append(number)

    def part(self, index: int, name: str, kind: LayerKind, static: Static) -> Part:
        """One part, with numbers of its own."""
        record = self.recorded
        numbers = _Numbers(self, index)
        given = record.passed.get(index - 1, -1)
        gradient = record.passed_back.get(index, -1)
        if index >= 0 and given >= 0:
            numbers.take(given)
        taken, taken_back = self.handed.get(("forward", index - 1), []), self.handed.get(("backward", index + 1), [])
        ends = (-1, self.count)
        across = [
            number
            for number, storage in enumerate(record.storages)
            if index in ends
            and storage.made == ("forward", -1)
            and self.ends.get(number) == ("forward", self.count)
            and self.saved_in.get(number, set()) <= {-1, 0}  # rotary tables: backward needs them in every layer
        ]
        for number in [*taken, *(across if index == self.count else ())]:
            numbers.take(number)
        forward = numbers.events(self.streams.get(("forward", index), []))
        if index < self.count and gradient >= 0:
            numbers.take(gradient)
        for number in taken_back:
            numbers.take(number)
        foreign = numbers.foreign
        backward = numbers.events(self.streams.get(("backward", index), []))
        numbers.foreign = foreign
        packs = self._packs(numbers, kind if 0 <= index < self.count else None)
        inside = 0 <= index < self.count
        ran = {record.calls[number].operator for number in numbers.calls}
        return Part(
            name=name,
            operators=tuple(
                TracedOperator(
                    one.name, one.owned, one.net, one.random, one.repeatable, one.consumers, aliases[one.name]
                )
                for aliases in [aliases_of(operator.name for operator in kind.operators)]
                for one in kind.operators
                if inside or one.name in ran
            ),
            values=tuple(self._value(number, index) for number in numbers.values),
            kernels=tuple(self._kernel(number, numbers) for number in numbers.kernels),
            calls=self._calls(numbers, kind),
            packs=tuple(packs),
            syncs=tuple(record.syncs[number] for number in numbers.syncs),
            forward=forward,
            backward=backward,
            input=numbers.values.get(given) if index >= 0 else None,
            output=numbers.values.get(record.passed.get(index, -1)),
            output_gradient=numbers.values.get(gradient) if index < self.count else None,
            input_gradient=numbers.values.get(record.passed_back.get(index - 1, -1)) if index >= 0 else None,
            taken=numbers.local(taken),
            handed=numbers.local(self.handed.get(("forward", index), [])),
            taken_back=numbers.local(taken_back),
            handed_back=numbers.local(self.handed.get(("backward", index), [])),
            across=numbers.local(across),
            frees_at=numbers.foreign if index == self.count else None,
            result=numbers.values.get(record.result) if index == self.count else None,
            static=static,
        )

    def optimizer(self) -> Part:
        """The optimizer's step."""
        numbers = _Numbers(self, 0, phase="optimizer")
        events = numbers.events(self.streams.get(("optimizer", 0), []))
        values = tuple(Value(self.recorded.storages[number].size) for number in numbers.values)
        kernels = tuple(self._kernel(number, numbers) for number in numbers.kernels)
        syncs = tuple(self.recorded.syncs[number] for number in numbers.syncs)
        return Part(name="optimizer", values=values, kernels=kernels, syncs=syncs, forward=events)

    def _value(self, number: int, index: int) -> Value:
        record, storage = self.recorded, self.recorded.storages[number]
        given = storage.made[1] != index
        end = self.ends.get(number)
        handed = number in (record.passed.get(index, -1), record.passed_back.get(index - 1, -1))
        takers = {index, index + 1} if number == record.passed.get(index, -1) else {index}
        takers |= {index - 1} if number == record.passed_back.get(index - 1, -1) else set()
        until = ""
        if number in self.handed.get(storage.made, ()):
            pass
        elif not given and number not in record.gradients and (end is None or end[1] not in takers):
            elsewhere = self.saved_in.get(number, set()) - takers
            until = "backward" if elsewhere or end is None or end[0] != "forward" else "forward"
        elif handed and end is None and number not in record.gradients:
            until = "backward"
        return Value(
            storage.size,
            "" if given else storage.operator,
            "boundary" if number == record.passed.get(index - 1, -1) and given else "operator",
            number in record.gradients,
            until,  # type: ignore[arg-type]
        )

    def _kernel(self, number: int, numbers: _Numbers) -> Kernel:
        one = self.recorded.kernels[number]
        return Kernel(
            one.kind,
            one.operator,
            one.dtype,
            one.flops,
            one.touched,
            one.shape,
            numbers.local(one.reads),
            numbers.local(one.writes),
            one.sent.ranks,
            one.sent.message,
            # What events around a collective show is not how long it takes: it runs on a stream of its own.
            self.seconds[number] if self.seconds is not None and not one.sent.ranks else None,
            one.sent.stride,
            one.stream,
            one.waited,
        )

    def _calls(self, numbers: _Numbers, kind: LayerKind) -> tuple[Call, ...]:
        reads: dict[str, tuple[str, ...]] = {}
        for call in kind.calls:
            reads[call.name] = tuple(dict.fromkeys((*reads.get(call.name, ()), *call.reads)))
        found = (self.recorded.calls[number] for number in numbers.calls)
        return tuple(Call(one.operator, numbers.local(one.inputs), reads.get(one.operator, ())) for one in found)

    def _packs(self, numbers: _Numbers, kind: LayerKind | None) -> list[Pack]:
        saved = [self.recorded.saved[number] for number in numbers.packs]
        known = _matched(kind, [operator for _, _, operator, _ in saved]) if kind is not None else [None] * len(saved)
        return [
            Pack(
                numbers.values.get(number, -1), found.pack.operator, found.pack.owner, found.pack.source,
                found.position, found.pack.movable, found.pack.cast,
            )
            if found is not None
            else Pack(numbers.values.get(number, -1), operator, "", "root" if number >= 0 else "static", 0, movable)
            for (number, _, operator, movable), found in zip(saved, known, strict=True)
        ]  # fmt: skip


class _Known(NamedTuple):
    """What the survey knows of a tensor that is saved."""

    pack: observation.Pack
    position: int


def _matched(kind: LayerKind, operators: Sequence[str]) -> list[_Known | None]:
    """For each tensor that was saved, by which operator, what the survey knows of it.

    As a rule the layer saved the same in both runs. Where its way depends on values, as with experts that got no token
    in one of them, an operator is taken to save again what it saved then, from the first on.
    """
    everything = [_Known(*one) for one in zip(kind.packs, kind.positions, strict=True)]
    if len(everything) == len(operators):
        return list(everything)
    by_operator: dict[str, list[_Known]] = {}
    for one in everything:
        by_operator.setdefault(one.pack.operator, []).append(one)
    turns: Counter[str] = Counter()
    result: list[_Known | None] = []
    for operator in operators:
        known = by_operator.get(operator, ())
        result.append(known[turns[operator] % len(known)] if known else None)
        turns[operator] += 1
    return result


class _Numbers:
    """The numbers of storages, kernels, calls and packs inside one part, in the order they appear."""

    def __init__(self, cut: _Cut, index: int, phase: str = "") -> None:
        self.cut, self.index, self.phase = cut, index, phase
        self.values: dict[int, int] = {}
        self.kernels: dict[int, int] = {}
        self.calls: dict[int, int] = {}
        self.packs: dict[int, int] = {}
        self.syncs: dict[int, int] = {}
        self.foreign: int | None = None
        """How many forward events come before the last that frees what a layer made."""

    def take(self, number: int) -> None:
        """A storage that another part made."""
        self.values.setdefault(number, len(self.values))

    def events(self, events: Sequence[Event]) -> tuple[Event, ...]:
        """The events that are about the part's own, by their new numbers."""
        result: list[Event] = []
        for what, number in events:
            if what in ("make", "free"):
                made = self.cut.recorded.storages[number].made
                own = made[1] == self.index and (made[0] == "optimizer") == (self.phase == "optimizer")
                if own:
                    self.take(number)
                if number in self.values:
                    result.append((what, self.values[number]))
                elif what == "free" and made[0] == "forward" and made[1] >= 0 and not self.phase:
                    self.foreign = len(result)
                continue
            tables = {"run": self.kernels, "call": self.calls, "end": self.calls, "sync": self.syncs}
            place = tables.get(what, self.packs)
            if what in ("use", "done") and number not in place:
                continue  # saved in another part
            result.append((what, place.setdefault(number, len(place))))
        return tuple(result)

    def local(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Those of the part, by their new numbers."""
        return tuple(self.values[number] for number in numbers if number in self.values)


def _static(module: nn.Module, states: Mapping[Any, Any], claimed: set[int]) -> Static:
    """What a module holds and no part has claimed yet."""
    parameters = [one for one in module.parameters() if _claim(one, claimed)]
    buffers = [one for one in module.buffers() if _claim(one, claimed)]
    trained = [one for one in parameters if one.requires_grad]
    held = [tensor for one in parameters for tensor in tensors_of(dict(states.get(one, {})))]
    return Static(
        tuple(map(storage_bytes, parameters)),
        tuple(map(storage_bytes, buffers)),
        tuple(map(storage_bytes, trained)),
        tuple(storage_bytes(tensor) for tensor in held if tensor.device == parameters[0].device or tensor.dim()),
    )


def _static_behind(model: nn.Module, found: Survey, states: Mapping[Any, Any], claimed: set[int]) -> Static:
    """What the modules after the layers hold: those that follow them in ``model.modules()``."""
    modules = list(model.modules())
    last = found.layers.modules[-1]
    place = max(modules.index(module) for module in last.modules())
    behind = [module for module in modules[place + 1 :] if next(module.children(), None) is None]
    parts = [_static(module, states, claimed) for module in behind]
    return Static(*(sum((part[column] for part in parts), ()) for column in range(len(Static._fields))))


def _claim(tensor: Tensor, claimed: set[int]) -> bool:
    key = storage_key(tensor)
    fresh = key not in claimed
    claimed.add(key)
    return fresh

"""Carry out the decisions for one layer while it runs: which saved tensors stay, leave, or are rebuilt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lowtide._torch_private import finish_collective, storage_key, without_graph
from lowtide.operators.calls import tensors_of
from lowtide.policy import Swap
from lowtide.runtime.intercept import Function, Wrappers, intercept
from lowtide.runtime.ledger import Line
from lowtide.runtime.program import Action, LayerProgram
from lowtide.runtime.rebuild import CapturedCall, Cast, Inside, Produced, Reference, Registry
from lowtide.runtime.refuse import refuse_compilation
from lowtide.runtime.saved import Saved, unpack
from lowtide.runtime.schedule import Starts, start
from lowtide.runtime.swap import Departures, SwapManager, Swapped

__all__ = ["DecidedLayer", "Span", "pass_by", "swap_input"]


class Span:
    """The numbers of a layer's operators, and what happens at its ends."""

    def __init__(self, manager: SwapManager, offset: int, count: int, last: bool) -> None:
        self.schedule = manager.schedule
        self.offset, self.count, self.last = offset, count, last

    def enter(self) -> int:
        """The layer begins; the number of its first operator."""
        return self.schedule.enter(self.offset)

    def leave(self, first: int, output: Any) -> None:
        """The layer has run: what is due when backward comes here starts with the gradient of its output."""
        due = self.schedule.reach(first + self.count)
        if self.last:
            due += self.schedule.finish()
        if due:
            for tensor in tensors_of(output):
                if tensor.requires_grad:
                    tensor.register_hook(_Gradient(due))
                    return


class _Gradient:
    """The one hook that starts copies back."""

    __slots__ = ("due",)

    def __init__(self, due: list[ReferenceType[Swapped]]) -> None:
        self.due = due

    def __call__(self, gradient: Tensor) -> None:
        start(self.due)


def pass_by(forward: Function, span: Span, index: int) -> Function:
    """A layer that keeps everything, and in which something of another layer is due."""

    def passed(*args: Any, **kwargs: Any) -> Any:
        refuse_compilation(index)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        first = span.enter()
        output = forward(*args, **kwargs)
        span.leave(first, output)
        return output

    return passed


def swap_input(forward: Function, span: Span, swap: Swap, line: Line, manager: SwapManager) -> Function:
    """A layer that is recomputed as a whole and whose input, all that it holds, is swapped."""

    def swapped(*args: Any, **kwargs: Any) -> Any:
        refuse_compilation(line.layer)
        given = tensors_of((args, kwargs))
        if not torch.is_grad_enabled() or not given:
            return forward(*args, **kwargs)
        first, key = span.enter(), storage_key(given[0])
        departures = Departures(manager)

        def pack(tensor: Tensor) -> Tensor | Saved:
            if storage_key(tensor) != key:
                return tensor
            saved = departures.out(tensor, swap, line, first + swap.prefetch)
            for one in departures.latest:
                manager.schedule.come_back(one.reference, first + span.count)
            return saved

        with saved_tensors_hooks(pack, unpack):
            output = forward(*args, **kwargs)
        span.leave(first, output)
        return output

    return swapped


class DecidedLayer:
    """A layer some of whose operators are recomputed or swapped."""

    def __init__(self, layer: nn.Module, program: LayerProgram, manager: SwapManager, span: Span) -> None:
        self.program, self.manager, self.span = program, manager, span
        self.run: _Run | None = None
        self.changed: Callable[[], None] | None = None
        """Called when the layer took another way than its kind."""
        self.wrappers = Wrappers()
        intercept(layer, program.sites, lambda: self.run, self.wrappers)
        self.wrappers.wrap(layer, self._decide)

    def _decide(self, forward: Function) -> Function:
        def decided(*args: Any, **kwargs: Any) -> Any:
            refuse_compilation(self.program.layer)
            if self.run is not None or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            first = self.span.enter()
            run = self.run = _Run(self.program, self.manager, first)
            try:
                with saved_tensors_hooks(run.pack, unpack):
                    output = forward(*args, **kwargs)
            finally:
                self.run = None
                run.end()
            self.span.leave(first, output)
            if run.changed and self.changed is not None:
                self.changed()
            return output

        return decided


class _Run:
    """One run of a layer. It lives as long as the graph, which holds its ``pack``: ``end`` empties it."""

    __slots__ = (
        "actions", "changed", "departures", "first", "given", "ledger", "name", "number", "open", "own", "place",
        "positions", "program", "registry", "schedule", "turns",
    )  # fmt: skip

    def __init__(self, program: LayerProgram, manager: SwapManager, first: int) -> None:
        self.program, self.actions, self.positions = program, program.actions, program.positions
        self.own = program.own
        self.schedule, self.ledger, self.first = manager.schedule, manager.ledger, first
        self.number = self.place = 0
        self.changed = False
        self.departures = Departures(manager)
        self.registry = Registry()
        self.turns: dict[Any, int] = {}
        self.name = ""
        self.open: CapturedCall | None = None
        self.given: list[Tensor] = []

    def end(self) -> None:
        """The layer has run, or raised."""
        self.changed |= 0 < self.number != len(self.actions)  # a frozen layer saves nothing, and did not change
        if self.departures.known:
            self.registry.send_away(self.departures.find)
        self.departures.known, self.departures.latest = {}, []
        self.registry, self.turns, self.given = Registry(), {}, []

    def pack(self, tensor: Tensor) -> Tensor | Saved:
        """What autograd saves in place of ``tensor``."""
        number = self.number
        self.number = number + 1
        self.place += 1
        if number >= len(self.actions):
            return without_graph(tensor)
        action = self.actions[number]
        position = self.first + self.positions[number]
        saved: Tensor | Saved = tensor
        if action is not None:
            if tensor.dtype is not action.dtype or tensor.dim() != action.rank:
                self.changed = True  # the layer took another way than when it was learnt: keep, and learn again
            elif action.swap is None:
                saved = self._rebuilt(tensor, action) or tensor
            else:
                saved = self._swapped(tensor, action, action.swap.prefetch, position)
        if saved is tensor and (self.own[number] or self.changed):
            saved = without_graph(tensor)
        if self.schedule.next <= position:
            due = self.schedule.reach(position)
            if due:
                return Starts(saved, due)
        return saved

    def _swapped(self, tensor: Tensor, action: Action, prefetch: int, position: int) -> Tensor | Saved:
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            self.changed = True  # parameters never move
            return tensor
        assert action.swap is not None
        departures = self.departures
        saved = departures.out(tensor, action.swap, action.line, position + prefetch)
        if action.last:
            for swapped in departures.latest:
                self.schedule.come_back(swapped.reference, position + prefetch)
        return saved

    def call(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that was listened for; capture it if what it produces is to be rebuilt."""
        if self.name:
            return function(*args, **kwargs)
        program, registry = self.program, self.registry
        self.name, self.place = name, 0
        self.given = given = tensors_of((args, kwargs))
        # What only casts belongs to what it was given, so it is rebuilt if that is.
        if name in program.recomputed or (
            name not in program.known and any(registry.find(tensor) is not None for tensor in given)
        ):
            arguments = registry.capture(args, kwargs)
            line = self.ledger.line(program.layer, name)
            random = given if name in program.random else None
            self.open = CapturedCall(name, function, arguments, line, self.ledger, random=random)
        try:
            output = function(*args, **kwargs)
            if self.open is not None:
                # A collective counts its result's version up while it is under way, on a thread of its own: what is
                # found by that count, and so which collectives are repeated, must be the same on every rank.
                output = finish_collective(function, output)
                registry.add(self.open, tensors_of(output), {storage_key(tensor) for tensor in given})
            return output
        finally:
            self.name, self.open, self.given = "", None, []

    def _rebuilt(self, tensor: Tensor, action: Action) -> Reference | None:
        """How to rebuild ``tensor``; None if that is not known for certain."""
        produced = self.registry.find(tensor)
        if produced is not None:
            produced.call.want("output", produced.output)
            return produced
        if self.open is not None and action.owner == self.name:
            self.open.want("inside", self.place - 1)
            return Inside(self.open, self.place - 1)
        return self._cast(tensor) if action.cast else None

    def _cast(self, tensor: Tensor) -> Cast | None:
        """How ``tensor`` is a cast of one of the running call's arguments, if it is of exactly one."""
        sources: list[Produced] = []
        for argument in self.given:
            produced = self.registry.find(argument)
            # A cast keeps the layout of what it casts; a view of it may follow where both are contiguous.
            alike = (tensor.shape, tensor.stride()) == (argument.shape, argument.stride())
            flat = tensor.numel() == argument.numel() and tensor.is_contiguous() and argument.is_contiguous()
            if produced is not None and argument.dtype != tensor.dtype and (alike or flat):
                sources.append(produced)
        if len(sources) != 1:
            return None
        sources[0].call.want("output", sources[0].output)
        return Cast(sources[0], tensor.dtype, tuple(tensor.shape))

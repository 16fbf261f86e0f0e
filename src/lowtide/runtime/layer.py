"""Carry out the decisions for one layer while it runs: which saved tensors stay, leave, or are rebuilt."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lowtide._torch_private import (
    DisableTorchFunction,
    current_backward,
    finish_collective,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    storage_key,
    under_compilation,
    without_graph,
)
from lowtide.operators.calls import tensors_of
from lowtide.operators.kept import Kept, kept_apart
from lowtide.operators.nodes import read_node
from lowtide.operators.wrappers import Function, Wrappers
from lowtide.policy import Keep, Swap
from lowtide.runtime.checked import LayerCheck
from lowtide.runtime.intercept import intercept
from lowtide.runtime.ledger import Ledger, Line
from lowtide.runtime.program import Action, LayerProgram, Part
from lowtide.runtime.rebuild import (
    CapturedCall,
    Cast,
    Inside,
    Produced,
    RandomState,
    Reference,
    Registry,
    Repeated,
    SeenAs,
)
from lowtide.runtime.refuse import refuse_compilation
from lowtide.runtime.saved import Pack, Saved, unpack
from lowtide.runtime.schedule import Starts, start
from lowtide.runtime.swap import Departures, SwapManager, Swapped, copy_on_host
from lowtide.runtime.view import View

__all__ = ["DecidedLayer", "Run", "Span", "keeping", "pass_by", "swap_input", "timed_again"]


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
        schedule, end = self.schedule, first + self.count
        if schedule.next > end and not (self.last and schedule.returning):
            schedule.now = end
            return
        due = schedule.reach(end)
        if self.last:
            due += schedule.finish()
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


def timed_again(forward: Function, ledger: Ledger, line: Line) -> Function:
    """A layer's forward as torch's own checkpoint repeats it in backward; what that takes is timed."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        if current_backward() == -1:
            return forward(*args, **kwargs)
        given = args[0] if args else None
        device = given.device if type(given) is Tensor else _device_of((args, kwargs))
        begin = ledger.begin(device)
        line.recomputes += 1
        try:
            return forward(*args, **kwargs)
        finally:  # the checkpoint stops it early by an exception
            ledger.end(line, device, begin)

    return timed


def _device_of(given: Any) -> torch.device:
    return next((tensor.device for tensor in tensors_of(given)), torch.device("cpu"))


def swap_input(forward: Function, span: Span, swap: Swap, line: Line, manager: SwapManager) -> Function:
    """A layer that is recomputed as a whole and whose input, all that it holds, is swapped.

    The input is wanted when backward reaches the layer's last operator.
    """

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
                manager.schedule.come_back(one.reference, first + span.count - 1 + swap.prefetch)
            return saved

        with saved_tensors_hooks(keeping(pack, manager), unpack):
            output = forward(*args, **kwargs)
        span.leave(first, output)
        return output

    return swapped


def keeping(pack: Pack, manager: SwapManager) -> Pack:
    """As ``pack``, but what would stay as it is goes to whoever asked for that."""
    keep = manager.keep
    if keep is None:
        return pack

    def kept(saved: Tensor | Saved) -> Tensor | Saved:
        if type(saved) is Kept:
            return keep(saved.kept)
        return keep(saved) if isinstance(saved, Tensor) else saved

    def pack_and_keep(tensor: Tensor) -> Tensor | Saved:
        with DisableTorchFunction():
            saved = pack(tensor)
            if type(saved) is Starts:
                saved.saved = kept(saved.saved)
                return saved
            return kept(saved)

    return pack_and_keep


class DecidedLayer:
    """A layer some of whose operators are recomputed or swapped."""

    def __init__(
        self,
        layer: nn.Module,
        program: LayerProgram,
        manager: SwapManager,
        span: Span,
        check: LayerCheck | None = None,
        *,
        narrow: bool = False,
    ) -> None:
        self.program, self.manager, self.span, self.check = program, manager, span, check
        self.run: _Capturing | None = None
        self.changed: Callable[[], None] | None = None
        """Called when the layer took another way than its kind."""
        self.wrappers = Wrappers()
        if program.captured:
            intercept(layer, program.sites, lambda: self.run, self.wrappers)
            self.wrappers.wrap(layer, self._capture)
        else:
            # The check follows the whole layer.
            part = program.part if check is None and narrow else Part("", 0, len(program.actions))
            self.wrappers.wrap(layer.get_submodule(part.module), partial(self._decide, part=part))
        if check is not None:
            check.tracker.attach()  # around ours, so that our hooks are the inner ones

    def _decide(self, forward: Function, part: Part) -> Function:
        program, manager, span, check = self.program, self.manager, self.span, self.check
        layer, schedule, offset, operators, last = program.layer, manager.schedule, span.offset, span.count, span.last
        start, stop, scheduled = part.start, part.stop, not part.module

        # Every layer in every step goes through this, and pays for each function that it calls.
        def decided(*args: Any, **kwargs: Any) -> Any:
            if under_compilation():
                refuse_compilation(layer)
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            first = schedule.base + offset
            if first < schedule.now:
                first = schedule.enter(offset)
            run = Run(program, manager, first)
            run.number = start
            pack = run.pack if check is None else check.packing(run)
            push_saved_tensors_hooks(pack if manager.keep is None else keeping(pack, manager), unpack)
            try:
                output = forward(*args, **kwargs)
            finally:
                pop_saved_tensors_hooks()
                if run.departures is not None or run.repeated is not None:
                    run.departures = run.repeated = None
            if scheduled:
                end = first + operators
                if schedule.next > end and not (last and schedule.returning):
                    schedule.now = end
                else:
                    span.leave(first, output)
            # What is frozen saves nothing, and did not change.
            if (run.number != stop and run.number != start) or run.changed:
                self._took_another_way()
            return output

        return decided

    def _capture(self, forward: Function) -> Function:
        def capturing(*args: Any, **kwargs: Any) -> Any:
            refuse_compilation(self.program.layer)
            if self.run is not None or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            first = self.span.enter()
            run = self.run = _Capturing(self.program, self.manager, first)
            try:
                pack = run.pack if self.check is None else self.check.packing(run)
                with saved_tensors_hooks(keeping(pack, self.manager), unpack):
                    output = forward(*args, **kwargs)
            finally:
                self.run = None
                run.end()
            self.span.leave(first, output)
            if 0 < run.number != len(self.program.actions) or run.changed:
                self._took_another_way()
            return output

        return capturing

    def remove(self) -> None:
        """Leave the layer as it was."""
        if self.check is not None:
            self.check.tracker.detach()
        self.wrappers.remove()

    def _took_another_way(self) -> None:
        if self.changed is not None:
            self.changed()


class Run:
    """One run of a layer. It lives as long as the graph, which holds its ``pack``."""

    changed = False
    departures: Departures | None = None
    repeated: dict[Any, Repeated] | None = None
    """By their nodes, the values that are saved more than once; only while the layer runs, since nodes hold this."""

    def __init__(self, program: LayerProgram, manager: SwapManager, first: int) -> None:
        self.actions, self.manager, self.first = program.actions, manager, first
        self.number = 0

    def pack(self, tensor: Tensor) -> Tensor | Saved:
        """What autograd saves in place of ``tensor``."""
        number = self.number
        self.number = number + 1
        try:
            action = self.actions[number]
        except IndexError:  # more than was learnt, or not what was learnt
            return without_graph(tensor)
        if action is None:
            return tensor
        return self.act(tensor, action) if isinstance(action, Action) else action(tensor)

    def act(self, tensor: Tensor, action: Action) -> Tensor | Saved:
        """Do what was decided."""
        if action.quick:
            # The two that are worth being quick: neither needs to know by its place which tensor this is.
            quick = self._repeated(tensor, action) if action.by_node else copy_on_host(tensor, action.line)
            if quick is not None:
                return quick
        decision = action.decision
        saved: Tensor | Saved | None = None
        if type(decision) is Keep:
            pass
        elif tensor.dtype is not action.dtype or tensor.dim() != action.rank:
            self.change()
        elif action.by_node:
            saved = self._repeated(tensor, action)
        elif type(decision) is Swap:
            saved = self._swapped(tensor, action, decision)
        else:
            saved = self.rebuilt(tensor, action)
        if saved is None or saved is tensor:
            if action.checked:
                saved = kept_apart(tensor)
            else:
                saved = without_graph(tensor) if action.output or self.changed else tensor
        schedule, position = self.manager.schedule, self.first + action.position
        if schedule.next <= position:
            due = schedule.reach(position)
            if due:
                return Starts(saved, due)
        return saved

    def change(self) -> None:
        """The layer took another way than when it was learnt: keep everything from here on, and learn it again."""
        self.changed = True
        self.actions = ()

    def rebuilt(self, tensor: Tensor, action: Action) -> Reference | None:
        """How to rebuild ``tensor``; None if that is not known for certain."""
        return None

    def _repeated(self, tensor: Tensor, action: Action) -> Saved | None:
        base = tensor._base
        whole = tensor if base is None else base
        repeated = None
        if action.shared and self.repeated is not None and not whole._version:
            repeated = self.repeated.get(whole.grad_fn)
        if repeated is not None:
            repeated.pending += 1
        else:
            call = read_node(whole, unpack)
            if call is None:
                self.change()
                return None
            repeated = Repeated(call, action.line, self.manager.ledger)
            if action.shared:
                self.repeated = self.repeated or {}
                self.repeated[whole.grad_fn] = repeated
        if base is None:
            return repeated
        with DisableTorchFunction():
            return SeenAs(repeated, View.by(tensor))

    def _swapped(self, tensor: Tensor, action: Action, swap: Swap) -> Tensor | Saved:
        if type(tensor) is nn.Parameter or type(tensor._base) is nn.Parameter:
            self.change()  # parameters never move
            return tensor
        departures = self.departures
        if departures is None:
            departures = self.departures = Departures(self.manager)
        due = self.first + action.position + swap.prefetch
        saved = departures.out(tensor, swap, action.line, due, alone=action.alone)
        if action.last:
            for swapped in departures.latest:
                self.manager.schedule.come_back(swapped.reference, due)
        return saved


class _Capturing(Run):
    """One run of a layer in which calls are captured. ``end`` empties it."""

    def __init__(self, program: LayerProgram, manager: SwapManager, first: int) -> None:
        super().__init__(program, manager, first)
        self.program = program
        self.begun = 0
        """How many tensors had been saved when the running call began."""
        self.registry = Registry()
        self.turns: dict[Any, int] = {}
        self.name = ""
        self.open: CapturedCall | None = None
        self.given: list[Tensor] = []

    def end(self) -> None:
        """The layer has run, or raised."""
        if self.departures is not None:
            self.registry.send_away(self.departures.find)
        if self.manager.keep is not None:
            self.registry.send_away(self.manager.keep)
        self.registry, self.turns, self.given = Registry(), {}, []
        self.departures = self.repeated = None

    def call(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that was listened for; capture it if what it produces is to be rebuilt."""
        if self.name:
            return function(*args, **kwargs)
        with DisableTorchFunction():  # our own look at the tensors is nobody's call
            self._begin(name, function, args, kwargs)
        try:
            output = function(*args, **kwargs)
            if self.open is not None:
                with DisableTorchFunction():
                    if self.open.collective:
                        # A collective counts its result's version up while it is under way, on a thread of its own:
                        # what is found by that count, and so what is repeated, must be the same on every rank.
                        output = finish_collective(output)
                    self.registry.add(self.open, output, self.given)
            return output
        finally:
            self.name, self.open, self.given = "", None, []

    def _begin(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        program, registry = self.program, self.registry
        self.name, self.begun = name, self.number
        given = [value for value in args if isinstance(value, Tensor)]
        if kwargs or len(given) < len(args):
            given = tensors_of((args, kwargs))
        self.given = given
        line = program.captured.get(name)
        # What only casts belongs to what it was given, so it is rebuilt if that is.
        if line is None and name not in program.known and any(registry.find(tensor) is not None for tensor in given):
            line = self.manager.ledger.line(program.layer, name)
        if line is not None:
            device = given[0].device if given else torch.device("cpu")
            self.open = call = CapturedCall(function, device, line, self.manager.ledger)
            call.collective = name in program.collectives
            call.hold(args, kwargs, registry)
            if name in program.random:
                call.random = RandomState(given)

    def act(self, tensor: Tensor, action: Action) -> Tensor | Saved:
        with DisableTorchFunction():
            return Run.act(self, tensor, action)

    def rebuilt(self, tensor: Tensor, action: Action) -> Reference | None:
        produced = self.registry.find(tensor)
        if produced is None and (self.open is None or action.owner != self.name) and not action.cast:
            produced = self.registry.find_by_storage(tensor)
        if produced is not None:
            produced.call.want_output(produced.output)
            return produced
        if self.open is not None and action.owner == self.name:
            place = self.number - 1 - self.begun
            self.open.want_inside(place)
            return Inside(self.open, place)
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
        sources[0].call.want_output(sources[0].output)
        return Cast(sources[0], tensor.dtype, tuple(tensor.shape))

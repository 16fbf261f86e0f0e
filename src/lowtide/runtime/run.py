"""One run of a layer: which of the tensors that autograd saves stay, leave, or are rebuilt."""

from __future__ import annotations

from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from lowtide._torch_private.modes import DisableTorchFunction
from lowtide._torch_private.nodes import is_cast
from lowtide._torch_private.storages import storage_bytes
from lowtide.operators.calls import tensors_of
from lowtide.operators.kept import kept, kept_apart
from lowtide.operators.nodes import read_node
from lowtide.operators.wrappers import Function
from lowtide.policy import Keep, Swap
from lowtide.runtime.ambient import Ambient, ambient, precision
from lowtide.runtime.module_state import Attributes, ModuleStates
from lowtide.runtime.program import Action, LayerProgram
from lowtide.runtime.randomness import HostRandom, RandomState
from lowtide.runtime.rebuild import (
    CapturedCall,
    Cast,
    Inside,
    Produced,
    Reference,
    Registry,
    Repeated,
    SeenAs,
)
from lowtide.runtime.saved import Saved, unpack
from lowtide.runtime.schedule import Starts
from lowtide.runtime.swap import Departures, SwapManager, copy_on_host
from lowtide.runtime.view import View

__all__ = ["CapturingRun", "Run"]


class Run:
    """One run of a layer. It lives as long as the graph, which holds its ``pack``."""

    changed = False
    departures: Departures | None = None
    repeated: dict[Any, Repeated] | None = None
    """By their nodes, the values that are saved more than once; only while the layer runs, since nodes hold this."""
    makers: dict[Repeated, Any] | None = None
    """The nodes that made what is repeated, where somebody asks for them; only while the layer runs, too."""

    def __init__(self, program: LayerProgram, manager: SwapManager, first: int, ambient: Ambient) -> None:
        self.actions, self.manager, self.first, self.ambient = program.actions, manager, first, ambient
        self.number = 0

    def pack(self, tensor: Tensor) -> Tensor | Saved:
        """What autograd saves in place of ``tensor``."""
        number = self.number
        self.number = number + 1
        try:
            action = self.actions[number]
        except IndexError:  # more than was learnt, or not what was learnt
            return kept_apart(tensor)
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
            apart = action.checked or action.output or self.changed
            saved = kept_apart(tensor) if apart else kept(tensor)
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
        if self.ambient.modes:  # a node does not tell what they made of its call
            action.line.note("kept while a mode of the user's own is on")
            return None
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
            repeated = Repeated(call, action.line, self.manager.ledger, self.ambient)
            if self.makers is not None:
                self.makers[repeated] = whole.grad_fn
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


class CapturingRun(Run):
    """One run of a layer in which calls are captured. ``end`` empties it."""

    paused = False
    """Whether what runs now is somebody else's."""

    def __init__(self, program: LayerProgram, manager: SwapManager, first: int) -> None:
        super().__init__(program, manager, first, ambient(precision()))
        self.program = program
        self.thread = get_ident()
        """Whose run it is; what other threads do with the same modules is theirs."""
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

    def call(
        self,
        name: str,
        function: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        module: nn.Module | None = None,
    ) -> Any:
        """Run a call that was listened for, of a function or of a leaf module; capture it if it is to be rebuilt."""
        if self.name:
            return function(*args, **kwargs)
        with DisableTorchFunction():  # our own look at the tensors is nobody's call
            self._begin(name, function, args, kwargs, module)
        try:
            output = function(*args, **kwargs)
            if self.open is not None:
                with DisableTorchFunction():
                    self.open.saved = self.number - self.begun
                    if self.open.random is not None and not self.open.random.moved():
                        self.open.random = None
                    self.registry.add(self.open, output, self.given)
            return output
        finally:
            self.name, self.open, self.given = "", None, []

    def _begin(
        self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module | None
    ) -> None:
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
            surroundings = ambient(self.ambient.precision)
            self.open = call = CapturedCall(function, device, line, self.manager.ledger, surroundings)
            call.hold(*_with_own_statistics(function, args, kwargs), registry)
            generators = [value for value in (*args, *kwargs.values()) if type(value) is torch.Generator]
            if module is not None:
                call.module = ModuleStates(Attributes((module,), self.manager.outside))
                call.buffers = self.manager.buffers.take((module,))
                generators += call.module.generators
                if not type(module).__module__.startswith("torch."):  # torch's own draw from torch's alone
                    call.host = HostRandom()
            call.random = RandomState(given, generators)

    def act(self, tensor: Tensor, action: Action) -> Tensor | Saved:
        with DisableTorchFunction():
            return Run.act(self, tensor, action)

    def rebuilt(self, tensor: Tensor, action: Action) -> Reference | None:
        produced = self.registry.find(tensor)
        if produced is None and (self.open is None or action.owner != self.name) and not action.cast:
            produced = self.registry.find_by_storage(tensor)
        if action.collective and (produced is None or not produced.call.collective):
            action.line.keep(storage_bytes(tensor), "it communicates, and this is not what a collective gave")
            return None
        if produced is not None:
            produced.call.want_output(produced.output)
            return produced
        if self.open is not None and action.owner == self.name:
            place = self.number - 1 - self.begun
            self.open.want_inside(place, tensor)
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
            if (
                produced is not None
                and argument.dtype != tensor.dtype
                and (alike or flat)
                and is_cast(tensor, argument)
            ):
                sources.append(produced)
        if len(sources) != 1:
            return None
        sources[0].call.want_output(sources[0].output)
        return Cast(sources[0], tensor.dtype, tuple(tensor.shape))


def _with_own_statistics(
    function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a norm with copies of its running statistics, which a replay would update once more."""
    if function not in _UPDATES_STATISTICS:
        return args, kwargs
    names = ("running_mean", "running_var")
    return (
        tuple(
            value.clone() if place in (1, 2) and isinstance(value, Tensor) else value
            for place, value in enumerate(args)
        ),
        {name: value.clone() if name in names and value is not None else value for name, value in kwargs.items()},
    )


_UPDATES_STATISTICS = frozenset({nn.functional.batch_norm, nn.functional.instance_norm})
"""Those that have them as arguments, second and third."""

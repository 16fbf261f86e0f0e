"""One run of a layer: which of the tensors that autograd saves are kept, offloaded or recomputed."""

from __future__ import annotations

from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from lowtide._torch_private.modes import DisableTorchFunction
from lowtide._torch_private.nodes import is_cast
from lowtide._torch_private.storages import storage_bytes
from lowtide._torch_private.views import view_base
from lowtide.operators.calls import tensors_of
from lowtide.operators.saved import Saved, kept, kept_apart
from lowtide.operators.wrappers import Function
from lowtide.policy import Keep, Swap
from lowtide.runtime.ambient import ambient, precision
from lowtide.runtime.captured_call import CapturedCall
from lowtide.runtime.module_state import ModuleStates
from lowtide.runtime.program import Action, LayerProgram
from lowtide.runtime.randomness import HostRandom, RandomState, default_generators, draws_nothing
from lowtide.runtime.references import Cast, Inside, Produced
from lowtide.runtime.registry import Registry
from lowtide.runtime.swap import Offloads, SwapManager

__all__ = ["CapturingRun", "Run"]


class Run:
    """One run of a layer that swaps. ``end`` empties it: the graph holds it, as it holds its ``pack``."""

    changed = False
    """Whether the layer diverged from its profile."""
    offloads: Offloads | None = None

    def __init__(self, program: LayerProgram, manager: SwapManager, first: int) -> None:
        self.program, self.actions, self.manager, self.first = program, program.actions, manager, first
        self.number = 0
        """How many tensors have been saved."""

    def pack(self, tensor: Tensor) -> Saved:
        """What autograd saves in place of ``tensor``."""
        number = self.number
        self.number = number + 1
        try:
            action = self.actions[number]
        except IndexError:  # more than were profiled, or the layer diverged
            return kept_apart(tensor)
        return self.act(tensor, action) if isinstance(action, Action) else action(tensor)

    def act(self, tensor: Tensor, action: Action) -> Saved:
        """Do what was decided."""
        decision = action.decision
        saved: Saved | None = None
        if type(decision) is Keep:
            pass
        elif tensor.dtype is not action.dtype or tensor.dim() != action.rank:
            self.diverge()
        elif type(decision) is Swap:
            saved = self._swapped(tensor, action, decision)
        else:
            saved = self.recomputed(tensor, action)
        if saved is None:
            saved = kept_apart(tensor) if action.apart or self.changed else kept(tensor)
        return self.manager.schedule.prefetching(saved, self.first + action.position)

    def diverge(self) -> None:
        """The layer's control flow is not that of its profile: keep everything from here on, and profile it again."""
        self.changed = True
        self.actions = ()

    def recomputed(self, tensor: Tensor, action: Action) -> Saved | None:
        """How to recompute ``tensor``; None if that is not known for certain."""
        return None

    def end(self) -> None:
        """The layer has run, or raised."""
        self.offloads = None

    def _swapped(self, tensor: Tensor, action: Action, swap: Swap) -> Saved | None:
        if type(tensor) is nn.Parameter or type(view_base(tensor)) is nn.Parameter:
            self.diverge()  # parameters never move
            return None
        offloads = self.offloads
        if offloads is None:
            offloads = self.offloads = Offloads(self.manager)
        due = self.first + action.position + swap.prefetch
        saved = offloads.pack(tensor, swap, action.line, due, alone=action.alone)
        if action.last:
            offloads.reload_at(due)
        return saved


class CapturingRun(Run):
    """One run of a layer in which calls are captured."""

    def __init__(self, program: LayerProgram, manager: SwapManager, first: int) -> None:
        super().__init__(program, manager, first)
        self.thread = get_ident()
        """Calls of the same modules on other threads belong to other runs."""
        self.precision = precision()
        self.begun = 0
        """How many tensors had been saved when the running call began."""
        self.registry = Registry()
        self.turns: dict[Any, int] = {}
        self.name = ""
        """The operator whose call is running."""
        self.open: CapturedCall | None = None
        """The call that is running, if it is captured."""
        self.given: list[Tensor] = []

    def end(self) -> None:
        """The layer has run, or raised."""
        if self.offloads is not None:
            self.registry.offload(self.offloads.find)
        if self.manager.keep is not None:
            self.registry.offload(self.manager.keep)
        self.registry, self.turns, self.given = Registry(), {}, []
        super().end()

    def call(
        self,
        name: str,
        function: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        module: nn.Module | None = None,
    ) -> Any:
        """Run an intercepted call, of a function or of a leaf module; capture it if it is to be recomputed."""
        if self.name:
            return function(*args, **kwargs)
        with DisableTorchFunction():  # our own look at the tensors is no call of the layer's
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
        # What only casts belongs to what it was given, so it is recomputed if that is.
        if line is None and name not in program.known and any(registry.find(tensor) is not None for tensor in given):
            line = self.manager.ledger.line(program.layer, name)
        if line is not None:
            device = given[0].device if given else torch.device("cpu")
            self.open = call = CapturedCall(function, device, line, self.manager.ledger, ambient(self.precision))
            call.capture(*_with_own_statistics(function, args, kwargs), registry.hold)
            generators = [value for value in (*args, *kwargs.values()) if type(value) is torch.Generator]
            if module is not None:
                call.module = ModuleStates(self.manager.attributes_of(module))
                call.buffers = self.manager.buffers.take((module,))
                generators += call.module.generators
                if not type(module).__module__.startswith("torch."):  # torch's own draw from torch's alone
                    call.host = HostRandom()
            if generators or call.ambient.modes or not draws_nothing(function, module, given):
                call.random = RandomState([*default_generators(given), *generators])

    def act(self, tensor: Tensor, action: Action) -> Saved:
        with DisableTorchFunction():
            return super().act(tensor, action)

    def recomputed(self, tensor: Tensor, action: Action) -> Saved | None:
        produced = self.registry.find(tensor)
        if produced is None and (self.open is None or action.owner != self.name) and not action.cast:
            produced = self.registry.find_by_storage(tensor)
        if action.collective and (produced is None or not produced.call.collective):
            action.line.keep(storage_bytes(tensor), "it communicates, and this is not what a collective returned")
            return None
        if produced is not None:
            produced.call.want_output(produced.output)
            return produced
        if self.open is not None and action.owner == self.name:
            return Inside(self.open, self.number - 1 - self.begun, tensor)
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
    """The arguments of a norm with copies of its running statistics, which a replay would update a second time."""
    if function not in _UPDATES_STATISTICS:
        return args, kwargs
    names = ("running_mean", "running_var")
    return (
        tuple(
            value.clone() if index in (1, 2) and isinstance(value, Tensor) else value
            for index, value in enumerate(args)
        ),
        {name: value.clone() if name in names and value is not None else value for name, value in kwargs.items()},
    )


_UPDATES_STATISTICS = frozenset({nn.functional.batch_norm, nn.functional.instance_norm})
"""Those that have them as arguments, second and third."""

"""Layers that ``torch.compile`` has to do with.

A compiled layer is one piece: it has no operators to decide, and what it saves is what the compiler chose. It can be
recomputed as a whole, or all that it saves can be swapped by hooks that stand outside the compiled function. Hooks
inside would either end the compilation there or be traced once and never run again, so decisions for single operators
are refused: for layers that are compiled when the Policy is applied then, for others when they first run compiled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lowtide._torch_private.compiled import compiled_call, is_compiled
from lowtide._torch_private.nodes import without_graph
from lowtide._torch_private.storages import storage_key
from lowtide.operators.calls import tensors_of
from lowtide.operators.wrappers import Function, Wrappers
from lowtide.policy import Decision, Keep, Swap
from lowtide.runtime.layer import Span, keeping
from lowtide.runtime.program import BOUNDARY
from lowtide.runtime.refuse import is_left_alone, refuse_compilation
from lowtide.runtime.saved import Saved, unpack
from lowtide.runtime.schedule import Starts
from lowtide.runtime.swap import Departures, SwapManager

__all__ = ["CompiledLayer", "has_compiled"]

EVERYTHING = "the compiled layer"
"""What the receipt calls all that a compiled layer saves."""


def has_compiled(layer: nn.Module) -> bool:
    """Whether the layer, or something in it, is compiled."""
    return any(is_compiled(module) for module in layer.modules())


class CompiledLayer:
    """A compiled layer of which all that it saves is swapped."""

    def __init__(
        self, layer: nn.Module, index: int, default: Decision, boundary: Keep | Swap, manager: SwapManager, last: bool
    ) -> None:
        self.layer, self.index, self.default, self.boundary = layer, index, default, boundary
        self.manager, self.lines = manager, manager.ledger
        # Its operators are unknown; what it saves is counted instead. Numbers only grow, so its place does not matter.
        self.span = Span(manager, 0, 0, last)
        self.wrappers = Wrappers()

    def attach(self) -> None:
        """Put the decisions to work."""
        self.wrappers.wrap(self.layer, self._swap, compiled_call(self.layer))

    def _swap(self, forward: Function) -> Function:
        def swapped(*args: Any, **kwargs: Any) -> Any:
            refuse_compilation(self.index)
            if not torch.is_grad_enabled() or is_left_alone():
                return forward(*args, **kwargs)
            given = tensors_of((args, kwargs))
            run = _Run(self, storage_key(given[0]) if given else 0)
            with saved_tensors_hooks(keeping(run.pack, self.manager), unpack):
                output = forward(*args, **kwargs)
            run.departures.known = {}
            self.span.count = run.number
            self.span.leave(run.first, output)
            return output

        return swapped


class _Run:
    """One run of a compiled layer."""

    def __init__(self, layer: CompiledLayer, given: int) -> None:
        self.layer, self.given = layer, given
        self.first, self.number = layer.span.enter(), 0
        self.departures = Departures(layer.manager)
        self.static: set[int] = set()

    def pack(self, tensor: Tensor) -> Tensor | Saved:
        layer, schedule = self.layer, self.layer.manager.schedule
        if not self.static:  # not before the layer runs: sharded parameters are gathered then
            self.static = {storage_key(one) for one in [*layer.layer.parameters(), *layer.layer.buffers()]}
        position = self.first + self.number
        self.number += 1
        saved: Tensor | Saved = without_graph(tensor)
        key = storage_key(tensor)
        decision = layer.boundary if key == self.given else layer.default
        movable = tensor.is_floating_point() or tensor.is_complex()
        if isinstance(decision, Swap) and movable and key not in self.static:
            line = layer.lines.line(layer.index, BOUNDARY if key == self.given else EVERYTHING)
            saved = self.departures.out(tensor, decision, line, position + decision.prefetch)
            for one in self.departures.latest:
                schedule.come_back(one.reference, position + decision.prefetch)
        due = schedule.reach(position)
        return Starts(saved, due) if due else saved

"""Layers that ``torch.compile`` has to do with.

A compiled layer is one piece: it has no operators to decide, and what it saves is what the compiler chose. It can be
recomputed as a whole, or all that it saves can be swapped by hooks around the compiled function. Hooks inside would
either end the compilation there or be traced once and never called later, so decisions for single operators are
refused: for layers that are compiled when the Policy is applied then, for others when they first run compiled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowtide._torch_private.compiled import is_compiled
from lowtide._torch_private.storages import storage_key
from lowtide.operators.calls import tensors_of
from lowtide.operators.saved import Saved, kept_apart
from lowtide.operators.wrappers import Function
from lowtide.policy import Decision, Keep, Swap
from lowtide.runtime.layer import call_with_hooks
from lowtide.runtime.program import BOUNDARY
from lowtide.runtime.refuse import is_left_alone, refuse_compilation
from lowtide.runtime.schedule import Span
from lowtide.runtime.swap import Offloads, SwapManager

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
        self.layer, self.index, self.default, self.boundary, self.manager = layer, index, default, boundary, manager
        # Its operators are unknown; what it saves is counted instead. Numbers only grow, so its offset does not matter.
        self.span = Span(manager.schedule, 0, 0, last)

    def swap(self, forward: Function) -> Function:
        """The compiled function, inside hooks that swap."""

        def swapped(*args: Any, **kwargs: Any) -> Any:
            refuse_compilation(self.index)
            if not torch.is_grad_enabled() or is_left_alone():
                return forward(*args, **kwargs)
            given = tensors_of((args, kwargs))
            run = _CompiledRun(self, storage_key(given[0]) if given else 0)
            output = call_with_hooks(self.manager.kept_by_rescue(run.pack), forward, args, kwargs)
            run.offloads.known = {}
            self.span.count = run.number
            self.span.leave(run.first, output)
            return output

        return swapped


class _CompiledRun:
    """One run of a compiled layer."""

    def __init__(self, layer: CompiledLayer, given: int) -> None:
        self.layer, self.given = layer, given
        self.first, self.number = layer.span.enter(), 0
        self.offloads = Offloads(layer.manager)
        self.static: set[int] = set()

    def pack(self, tensor: Tensor) -> Saved:
        """What autograd saves in place of ``tensor``."""
        layer, manager = self.layer, self.layer.manager
        if not self.static:  # not before the layer runs: sharded parameters are gathered then
            self.static = {storage_key(one) for one in [*layer.layer.parameters(), *layer.layer.buffers()]}
        position = self.first + self.number
        self.number += 1
        saved: Saved | None = None
        key = storage_key(tensor)
        decision = layer.boundary if key == self.given else layer.default
        movable = tensor.is_floating_point() or tensor.is_complex()
        if isinstance(decision, Swap) and movable and key not in self.static:
            line = manager.ledger.line(layer.index, BOUNDARY if key == self.given else EVERYTHING)
            saved = self.offloads.pack(tensor, decision, line, position + decision.prefetch)
            self.offloads.reload_at(position + decision.prefetch)
        return manager.schedule.prefetching(saved or kept_apart(tensor), position)

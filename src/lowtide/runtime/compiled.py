"""Compiled layers of which something is swapped, by hooks around the compiled function.

A compiled function saves its tensors when it has run, in the order of its forward graph's outputs. Where the layer's
operators are decided one by one, that order, noted when the graph was split, says whose value each of them is; it is
checked against their shapes. A prefetch counts saved tensors here, not operators: nothing between them can be noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from lowtide._torch_private.compiled import is_compiled, uncompiled
from lowtide._torch_private.storages import storage_key
from lowtide.operators.calls import tensors_of
from lowtide.operators.layers import find_layers
from lowtide.operators.saved import Saved, call_with_hooks, kept_apart
from lowtide.operators.wrappers import Function
from lowtide.policy import Decision, LayerPolicy, Swap
from lowtide.runtime.graph import GraphLayer, SavedValue
from lowtide.runtime.program import BOUNDARY
from lowtide.runtime.refuse import is_left_alone, refuse_compilation
from lowtide.runtime.schedule import Prefetching, Span
from lowtide.runtime.swap import Offloads, SwapManager

__all__ = ["CompiledLayer", "compiled_in_place", "has_compiled"]

EVERYTHING = "the compiled layer"
"""What the receipt calls all that a compiled layer saves."""


def has_compiled(layer: nn.Module) -> bool:
    """Whether the layer, or something in it, is compiled."""
    return any(is_compiled(module) for module in layer.modules())


def compiled_in_place(model: nn.Module, layers: str | None = None) -> bool:
    """Whether nothing but layers of the model is compiled, each as a whole and in place."""
    compiled = [module for module in model.modules() if is_compiled(module)]
    if not compiled:
        return True
    own = set(find_layers(model, layers).modules)
    return all(module in own and uncompiled(module) is module for module in compiled)


class CompiledLayer:
    """A compiled layer, and what of it is swapped."""

    def __init__(
        self,
        layer: nn.Module,
        index: int,
        settings: LayerPolicy,
        graph: GraphLayer | None,
        manager: SwapManager,
        last: bool,
    ) -> None:
        """``graph`` has its decisions by operator; None: all that it saves is decided alike."""
        self.layer, self.index, self.settings, self.graph, self.manager = layer, index, settings, graph, manager
        # What it saves is counted in place of its operators. Numbers only grow, so its offset does not matter.
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
            self.span.count = run.settle()
            self.span.leave(run.first, output)
            return output

        return swapped

    def owners(self, saved: list[Tensor]) -> Sequence[str]:
        """The operator whose value each of these is; empty where it is none's, or not known."""
        if self.graph is not None:
            for order in self.graph.saved:
                if len(order) == len(saved) and all(map(SavedValue.is_like, order, saved)):
                    return [value.operator for value in order]
            self.manager.ledger.line(self.index, EVERYTHING).note("kept: its compiled graph is not known")
        return [""] * len(saved)


class _CompiledRun:
    """One run of a compiled layer."""

    def __init__(self, layer: CompiledLayer, given: int) -> None:
        self.layer, self.given = layer, given
        self.first = layer.span.enter()
        self.saved: list[Tensor] = []
        self.holders: list[Prefetching] = []

    def pack(self, tensor: Tensor) -> Saved:
        """What autograd saves in place of ``tensor``: it is kept until all are known."""
        holder = Prefetching(kept_apart(tensor), [])
        self.saved.append(tensor)
        self.holders.append(holder)
        return holder

    def settle(self) -> int:
        """Swap what is to be swapped of all that was saved; how much that was."""
        layer, manager = self.layer, self.layer.manager
        offloads, schedule = Offloads(manager), manager.schedule
        # Not before the layer has run: sharded parameters are gathered then.
        static = {storage_key(one) for one in [*layer.layer.parameters(), *layer.layer.buffers()]}
        owners = layer.owners(self.saved)
        for position, tensor, holder, owner in zip(count(self.first), self.saved, self.holders, owners, strict=False):
            key = storage_key(tensor)
            name, decision = self._decision(key, owner)
            movable = tensor.is_floating_point() or tensor.is_complex()
            if isinstance(decision, Swap) and movable and key not in static:
                due = position + decision.prefetch
                saved = offloads.pack(tensor, decision, manager.ledger.line(layer.index, name), due)
                if saved is not None:
                    holder.saved = saved
                    offloads.reload_at(due)
            holder.due = schedule.reach(position) if schedule.next <= position else []
        # Torch holds the pack hook, and so this, until backward.
        self.saved.clear()
        self.holders.clear()
        return len(owners)

    def _decision(self, key: int, owner: str) -> tuple[str, Decision]:
        """What becomes of a tensor, and what the receipt calls it."""
        settings, graph = self.layer.settings, self.layer.graph
        if key == self.given:
            return BOUNDARY, settings.boundary
        if graph is None or not owner:
            return EVERYTHING, settings.default
        return owner, graph.decisions.get(owner, settings.default)

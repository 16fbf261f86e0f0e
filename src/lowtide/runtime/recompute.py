"""Carry out the decisions for one layer while it runs: which saved tensors are kept and which are rebuilt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowtide._torch_private import storage_key
from lowtide.operators.calls import tensors_of
from lowtide.operators.kinds import LayerKind
from lowtide.policy import Decision, Recompute
from lowtide.runtime.rebuild import CapturedCall, Cast, Inside, Produced, Reference, Registry, resolve_reference

__all__ = ["RecomputingLayer"]


class RecomputingLayer:
    """Listens to a layer's calls and answers autograd's request to save a tensor."""

    def __init__(self, kind: LayerKind, decisions: Mapping[str, Decision]) -> None:
        self.kind = kind
        facts = {operator.name: operator for operator in kind.operators}
        self.recomputed = {
            name for name, decision in decisions.items() if isinstance(decision, Recompute) and facts[name].repeatable
        }
        self.refused = tuple(
            name
            for name, decision in decisions.items()
            if isinstance(decision, Recompute) and not facts[name].repeatable and facts[name].owned
        )
        self.random = {name for name, operator in facts.items() if operator.random}
        self.known = set(facts)
        self.changed = False
        self._reset()

    def _reset(self) -> None:
        self.registry = Registry()
        self.position = 0
        self.name = ""
        self.call: CapturedCall | None = None
        self.place = 0
        self.given: list[Tensor] = []
        self.hooks: Any = None

    def layer_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._reset()
        if torch.is_grad_enabled():
            self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, unpack)
            self.hooks.__enter__()

    def layer_ends(self) -> None:
        if self.hooks is not None:
            self.changed |= self.position != len(self.kind.packs)
            self.hooks.__exit__(None, None, None)
        self._reset()

    def call_begins(self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name, self.place = name, 0
        if self.hooks is None:
            return
        self.given = tensors_of((args, kwargs))
        # What only views or casts belongs to what it was given, so it is rebuilt if that is.
        follows = name not in self.known and any(self.registry.find(tensor) for tensor in self.given)
        if name in self.recomputed or follows:
            arguments = self.registry.capture(args, kwargs)
            self.call = CapturedCall(name, function, arguments, random=name in self.random)

    def call_ends(self, output: Any) -> None:
        if self.call is not None:
            self.registry.add(self.call, tensors_of(output), {storage_key(tensor) for tensor in self.given})
        self.call, self.given, self.name = None, [], ""

    def pack(self, tensor: Tensor) -> Tensor | Reference:
        """What is saved in place of ``tensor``: itself, or how to rebuild it."""
        info = self.kind.packs[self.position] if self.position < len(self.kind.packs) else None
        self.position += 1
        place, self.place = self.place, self.place + 1
        if info is None or (info.operator, info.dtype, len(info.shape)) != (self.name, tensor.dtype, tensor.dim()):
            self.changed = True  # the layer took another way than when it was learnt: keep, and learn again
            return tensor
        if not info.movable or info.source != "operator" or info.owner not in self.recomputed:
            return tensor
        produced = self.registry.find(tensor)
        if produced is not None:
            produced.call.want("output", produced.output)
            return produced
        if self.call is not None and info.owner == self.name:
            self.call.want("inside", place)
            return Inside(self.call, place)
        return self._cast(tensor, info.owner) or tensor

    def _cast(self, tensor: Tensor, owner: str) -> Cast | None:
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


def unpack(saved: Tensor | Reference) -> Tensor:
    """Give autograd back what it saved."""
    return saved if isinstance(saved, Tensor) else resolve_reference(saved)

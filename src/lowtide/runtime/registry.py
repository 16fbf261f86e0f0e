"""Which captured call produced a tensor, while a layer runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lowtide._torch_private.storages import StorageWeakRef, storage_key, weak_storage
from lowtide._torch_private.subclasses import inner_tensor
from lowtide._torch_private.versions import count_of_writes, own_version, version_of
from lowtide._torch_private.views import view_base
from lowtide.operators.calls import tensors_of
from lowtide.operators.saved import Saved
from lowtide.runtime.arguments import hold
from lowtide.runtime.captured_call import CapturedCall, HeldArgument, RecomputedArgument
from lowtide.runtime.references import Produced
from lowtide.runtime.tensor_form import form_of_tensor
from lowtide.runtime.view import View

__all__ = ["Registry"]


class Registry:
    """The outputs of captured calls that are alive while a layer runs."""

    __slots__ = ("entries", "held", "parts", "storages")

    def __init__(self) -> None:
        self.entries: dict[int, tuple[weakref.ReferenceType[Tensor], CapturedCall, int, int]] = {}
        self.storages: dict[int, tuple[StorageWeakRef, CapturedCall, int, Tensor, int]] = {}
        """By storage: a reference to it, whose output it holds, and the output's version counter, now and then."""
        self.parts = dist.is_available() and dist.is_initialized()
        """Whether plain tensors may be saved as the local parts of DTensors, which autograd does not know of."""
        self.held: list[HeldArgument] = []

    def add(self, call: CapturedCall, output: Any, given: list[Tensor]) -> None:
        """Remember what ``call`` produced; an output that is one of its inputs, or a view of one, is not."""
        made = (output,) if type(output) is Tensor else tensors_of(output)
        call.forms = [form_of_tensor(tensor) for tensor in made]
        for index, tensor in enumerate(made):
            base = view_base(tensor)
            for one in given:
                if tensor is one or (base is not None and (base is one or base is view_base(one))):
                    break
            else:
                self.entries[id(tensor)] = (weakref.ref(tensor), call, index, version_of(tensor))
                if self.parts or type(tensor) is not Tensor:  # others are known by the object or its views
                    writes = count_of_writes(inner_tensor(tensor))
                    self.storages[storage_key(tensor)] = (
                        weak_storage(tensor),
                        call,
                        index,
                        writes,
                        own_version(writes),
                    )

    def find(self, tensor: Tensor) -> Produced | None:
        """The output that ``tensor`` is, or is a view of; None if it has been written to since."""
        entry = self.entries.get(id(tensor))
        if entry is not None and entry[0]() is tensor:
            return Produced(entry[1], entry[2], None) if version_of(tensor) == entry[3] else None
        base = view_base(tensor)
        if base is None:
            return None
        entry = self.entries.get(id(base))
        if entry is None or entry[0]() is not base or version_of(tensor) != entry[3]:
            return None
        return Produced(entry[1], entry[2], View.by(tensor))

    def find_by_storage(self, tensor: Tensor) -> Produced | None:
        """As :meth:`find`, for what is neither the object nor a view that autograd knows of, such as a local part.

        The object that the call returned may be freed, or not yet: see [Note: re-issued collectives].
        """
        if not self.storages or (entry := self.storages.get(storage_key(tensor))) is None:
            return None
        alive, call, index, writes, version = entry
        # A view that was made below autograd has a version counter of its own, from zero.
        if alive.expired() or own_version(writes) != version or own_version(inner_tensor(tensor)) not in (version, 0):
            return None
        return Produced(call, index, View.by(tensor))

    def hold(self, value: Any) -> Any:
        """What a captured call holds in place of an argument."""
        if not isinstance(value, Tensor):
            return hold(value)
        source = (self.find(value) or self.find_by_storage(value)) if self.entries else None
        if source is None:
            held = HeldArgument(value)
            self.held.append(held)
            return held
        source.call.want_output(source.output)
        return RecomputedArgument(source, value.requires_grad)

    def offload(self, find: Callable[[Tensor], Saved | None]) -> None:
        """Free held arguments whose storages are offloaded, as ``find`` knows: they are reloaded from there."""
        for held in self.held:
            held.offload(find)

"""Modules as they were when they were called: what changes them before backward does not change what they did.

Kept are attributes, the containers and objects among them, parameters and buffers, and the variables outside that the
modules' code names (:mod:`lowtide.runtime.outside`). For a replay what has changed since
is put back, and after it everything is as it was before the replay. What has not changed is left alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from operator import is_
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lowtide._torch_private import PLAIN, storage_bytes, unseen_by_modes, version_of
from lowtide.errors import RebuildError
from lowtide.runtime.arguments import is_shared
from lowtide.runtime.outside import Outside, Variable
from lowtide.runtime.randomness import is_generator

__all__ = ["Attributes", "BufferCopies", "ModuleStates", "modules_of"]

_LIMIT = 2_000
"""No module's attributes are made of more objects than this; what is further away is taken for a world of its own."""
_NOT_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"} | {"forward", "_compiled_call_impl"}


def modules_of(layer: nn.Module) -> list[nn.Module]:
    """A module and all that it consists of, each once."""
    found = [layer]
    known = {layer}
    for module in found:  # which grows
        for child in module._modules.values():
            if child is not None and child not in known:
                known.add(child)
                found.append(child)
    return found


class Attributes:
    """The attributes of some modules, and what is in the containers and objects among them."""

    __slots__ = ("contents", "generators", "holders", "modules", "outside", "own", "tensors", "values", "variables")

    def __init__(self, modules: Sequence[nn.Module], outside: Outside) -> None:
        self.modules, self.outside = modules, outside
        self.own = [(vars(module), vars(module).copy()) for module in modules]
        self.holders = [*(now for now, _ in self.own), *(module._modules for module in modules)]
        self.values = tuple(chain.from_iterable(map(dict.values, self.holders)))
        self.contents: list[tuple[Any, Any]] = []
        """Containers, the attributes of objects among them, with copies of what is in them."""
        self.tensors: list[tuple[str, Tensor]] = []
        self.generators: list[Any] = []
        """From which the modules may draw random numbers."""
        self.variables: list[tuple[Variable, Any]] = []
        """What their code names outside of them."""
        seen: set[int] = set()
        for module in modules:
            self._name(type(module), seen)
        for _, own in self.own:
            for name in own.keys() - _NOT_ATTRIBUTES:
                if type(own[name]) not in _PLAIN:
                    self._look_into(name, own[name], seen)

    def _name(self, code: Any, seen: set[int]) -> None:
        if id(code) in seen:
            return
        seen.add(id(code))
        for variable in self.outside.named_by(code):
            value = variable.value
            if value is not ...:
                self.variables.append((variable, value))
                if type(value) not in _PLAIN:
                    self._look_into(variable.name, value, seen)

    def _look_into(self, name: str, value: Any, seen: set[int]) -> None:
        if isinstance(value, Tensor):
            self.tensors.append((name, value))
            return
        if isinstance(value, FunctionType):
            self._name(value, seen)
            return
        if id(value) in seen or len(seen) > _LIMIT:
            return
        seen.add(id(value))
        if is_generator(value):
            self.generators.append(value)
        if is_shared(value):
            return
        for content in _contents(value):
            self.contents.append((content, content.copy()))
            for item in content.values() if isinstance(content, dict) else content:
                if type(item) not in _PLAIN:
                    self._look_into(name, item, seen)
        if isinstance(value, tuple):
            for item in value:
                self._look_into(name, item, seen)

    def unchanged(self) -> bool:
        """Whether everything is still the same object as it was."""
        # Whole layers are looked at three times in every step, so that this has to be quick: no call for each.
        return (
            sum(map(len, self.holders)) == len(self.values)
            and all(map(is_, chain.from_iterable(map(dict.values, self.holders)), self.values))
            and all(_same_content(content, saved) for content, saved in self.contents)
            and all(variable.value is value for variable, value in self.variables)
        )

    def put_back(self) -> None:
        """Let everything be as it was; what all modules have, such as hooks, is not theirs."""
        for now, was in self.own:
            for name in now.keys() - _NOT_ATTRIBUTES - was.keys():
                del now[name]
            for name in was.keys() - _NOT_ATTRIBUTES:
                if now.get(name, _MISSING) is not was[name]:
                    now[name] = was[name]
        for content, saved in self.contents:
            _set_content(content, saved)
        for variable, value in self.variables:
            if variable.value is not value:
                variable.set(value)


class ModuleStates:
    """Some modules as they are now, but for their buffers: see :class:`BufferCopies`."""

    __slots__ = ("attributes", "gradients", "tensors")

    def __init__(self, attributes: Attributes) -> None:
        self.attributes = attributes
        self.gradients: list[tuple[Tensor, bool]] = []
        """Which parameters were to get one."""
        self.tensors: list[tuple[dict[str, Any] | None, str, Tensor, int]] = [
            (None, name, tensor, version_of(tensor)) for name, tensor in self.attributes.tensors
        ]
        """Each with where the module has it, its name and its version; those among attributes, which are put back by
        themselves, without the first."""
        for module in attributes.modules:
            for name, tensor in module._parameters.items():
                if tensor is not None:
                    self.tensors.append((module._parameters, name, tensor, version_of(tensor)))
                    self.gradients.append((tensor, tensor.requires_grad))

    @property
    def generators(self) -> list[Any]:
        """From which the modules may draw random numbers."""
        return self.attributes.generators

    @contextmanager
    def restored(self, whose: str) -> Iterator[None]:
        """The modules as they were. RebuildError if a tensor of theirs was written to."""
        others = self._others(whose)
        was = self.attributes
        now = was if was.unchanged() else Attributes(was.modules, was.outside)
        tensors = [(holder, name, holder[name]) for holder, name, _ in others]
        toggled = [(one, wanted) for one, wanted in self.gradients if one.requires_grad != wanted and one.is_leaf]
        try:
            if now is not was:
                was.put_back()
            for one, wanted in toggled:
                one.requires_grad_(wanted)
            for holder, name, tensor in others:
                holder[name] = tensor
            yield
        finally:
            for holder, name, tensor in tensors:
                holder[name] = tensor
            for one, wanted in toggled:
                one.requires_grad_(not wanted)
            if now is not was:
                was.put_back()  # a replay may add to containers that are not there now
            if not now.unchanged():
                now.put_back()

    def _others(self, whose: str) -> list[tuple[dict[str, Any], str, Tensor]]:
        """The parameters in whose place others are now."""
        found: list[tuple[dict[str, Any], str, Tensor]] = []
        for holder, name, tensor, version in self.tensors:
            if version_of(tensor) != version:
                raise RebuildError(
                    f"{whose} cannot be recomputed: {name}, a tensor of its module, was changed in place after it ran"
                    f" (version {version_of(tensor)}, expected {version}); keep it"
                )
            if holder is None or holder.get(name) is tensor:
                continue
            if name not in holder:
                raise RebuildError(f"{whose} cannot be recomputed: its module has no {name} any more; keep it")
            # FSDP puts gathered parameters in the place of sharded ones and back, by itself and in time.
            if type(tensor) not in PLAIN or type(holder[name]) not in PLAIN:
                continue
            if tensor.numel() and not storage_bytes(tensor):
                continue
            found.append((holder, name, tensor))
        return found


_MISSING = object()


def _contents(value: Any) -> list[Any]:
    """What of a value Python code can change: itself if it is a container, its attributes if it is an object."""
    found = [value] if type(value) in _CONTAINERS else []
    attributes = getattr(value, "__dict__", None)
    return [*found, attributes] if type(attributes) is dict else found


def _set_content(content: Any, saved: Any) -> None:
    if _same_content(content, saved):
        return
    if isinstance(content, list):
        content[:] = saved
    else:
        content.clear()
        content.extend(saved) if isinstance(content, deque) else content.update(saved)


def _same_content(content: Any, saved: Any) -> bool:
    if len(content) != len(saved):
        return False
    if isinstance(content, dict):
        return all(content.get(key, _MISSING) is value for key, value in saved.items())
    if isinstance(content, set):
        return bool(content == saved)
    return all(one is other for one, other in zip(content, saved, strict=True))


_CONTAINERS = frozenset({list, dict, set, deque})
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})


class BufferCopies:
    """Copies of modules' buffers, for modules that write into them and are replayed.

    Kernels of running statistics write without counting it in the tensor's version, and a layer may begin to write at
    any time, such as when a norm is unfrozen. So small buffers are copied in every run. Large ones are copied when
    their version has changed since the last copy; until one has changed for the first time that copy is on the host,
    where it takes nothing from the device.
    """

    SMALL = 1 << 16

    def __init__(self) -> None:
        self.last: dict[int, tuple[Tensor, int, Tensor]] = {}
        self.changing: set[int] = set()

    def take(self, modules: Iterable[nn.Module]) -> list[tuple[dict[str, Any], str, Tensor]]:
        """Copies of all buffers, each with where the module has it."""
        copies: dict[int, Tensor] = {}
        found: list[tuple[dict[str, Any], str, Tensor]] = []
        with torch.no_grad():
            for module in modules:
                holder: dict[str, Any] = module._buffers
                for name, buffer in holder.items():
                    if buffer is not None:
                        key = id(buffer)
                        if key not in copies:
                            copies[key] = self._copy(buffer)
                        found.append((holder, name, copies[key]))
        return found

    def _copy(self, buffer: Tensor) -> Tensor:
        if storage_bytes(buffer) <= self.SMALL:
            with unseen_by_modes() if type(buffer) in PLAIN else nullcontext():
                return buffer.clone()
        key, version = id(buffer), version_of(buffer)
        known = self.last.get(key)
        if known is not None and known[0] is buffer:
            if known[1] == version:
                return known[2]
            self.changing.add(key)
        copied = buffer.clone() if key in self.changing else buffer.to("cpu", copy=True)
        self.last[key] = (buffer, version, copied)
        return copied

    @staticmethod
    @contextmanager
    def restored(copies: list[tuple[dict[str, Any], str, Tensor]]) -> Iterator[None]:
        """The buffers with what was in them; what is written to them goes nowhere."""
        now = [(holder, name, holder.get(name)) for holder, name, _ in copies]
        made: dict[int, Tensor] = {}
        try:
            with torch.no_grad():
                for (holder, name, copied), (*_, current) in zip(copies, now, strict=True):
                    if id(copied) not in made:
                        device = copied.device if current is None else current.device
                        # Torch's selective checkpoint counts kernels: these are not the layer's.
                        with unseen_by_modes() if type(copied) in PLAIN else nullcontext():
                            made[id(copied)] = copied.to(device, copy=True)
                    holder[name] = made[id(copied)]
            yield
        finally:
            for holder, name, current in now:
                holder[name] = current

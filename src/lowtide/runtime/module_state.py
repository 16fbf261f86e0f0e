"""The state of modules at a call: what changes them before backward does not change a replay.

Kept are attributes, the containers and objects among them, parameters and buffers, and the variables outside that the
modules' code names (:mod:`lowtide.runtime.outside`). For a replay what has changed since
is restored, and undone after it. What has not changed is left alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from operator import attrgetter, is_
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from lowtide._torch_private.compiled import dict_version
from lowtide._torch_private.modes import unseen_by_modes
from lowtide._torch_private.modules import buffers_of, parameters_of, submodules_of
from lowtide._torch_private.storages import storage_bytes
from lowtide._torch_private.subclasses import PLAIN
from lowtide._torch_private.versions import version_of, versions_of
from lowtide.errors import RebuildError
from lowtide.runtime.arguments import is_shared
from lowtide.runtime.outside import Outside, Variable
from lowtide.runtime.randomness import is_generator

__all__ = ["Attributes", "BufferCopies", "ModuleStates", "modules_of", "named_modules_of"]

_LIMIT = 2_000
"""No module's attributes are made of more objects than this; what is further is taken as it is."""
_NOT_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"} | {"forward", "_compiled_call_impl"}


def modules_of(layer: nn.Module) -> list[nn.Module]:
    """A module and all that it consists of, each once."""
    return [module for _, module in named_modules_of(layer)]


def named_modules_of(layer: nn.Module) -> list[tuple[str, nn.Module]]:
    """The same with the prefix of each one's names; ``named_modules`` takes several times as long."""
    found, known = [("", layer)], {layer}
    for prefix, module in found:  # which grows
        for name, child in submodules_of(module).items():
            if child is not None and child not in known:
                known.add(child)
                found.append((f"{prefix}{name}.", child))
    return found


class Attributes:
    """The attributes of some modules, and what is in the containers and objects among them."""

    __slots__ = (
        "contents",
        "count",
        "generators",
        "holders",
        "modules",
        "outside",
        "own",
        "parameters",
        "sequences",
        "slots",
        "tensors",
        "values",
        "variables",
        "versions",
        "watched",
    )

    def __init__(self, modules: Sequence[nn.Module], outside: Outside) -> None:
        self.modules, self.outside = modules, outside
        self.watched: list[dict[Any, Any]] = [*map(vars, modules), *(submodules_of(module) for module in modules)]
        """In which anything that changes is a change. See :meth:`unchanged`."""
        self.versions: list[int] = []
        self.own = [(vars(module), _own_attributes(module)) for module in modules]
        self.slots = _slots([*self.own, *((submodules_of(module), submodules_of(module)) for module in modules)])
        self.values = tuple(map(dict.get, *self.slots))
        self.holders = [parameters_of(module) for module in modules]
        self.count = sum(map(len, self.holders))
        """Of all parameters' names."""
        self.parameters = _slots([(one, one) for one in self.holders])
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
            for name, value in own.items():
                if type(value) not in _PLAIN:
                    self._look_into(name, value, seen)
        self.watched += [content for content, _ in self.contents if isinstance(content, dict)]
        self.sequences = [pair for pair in self.contents if not isinstance(pair[0], dict)]
        """Those of the containers that are no mappings, and have no versions."""

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
        """Whether everything is still the same object.

        This is asked three times for every layer in every step. So mappings are compared one by one only if their
        versions, which count what is put into them, say that they have changed.
        """
        versions = list(map(dict_version, self.watched))
        if versions != self.versions:
            if not all(map(is_, map(dict.get, *self.slots), self.values)) or not self._has_same_names():
                return False
            if not all(_same_content(content, saved) for content, saved in self.contents):
                return False
            self.versions = versions
        elif self.sequences and not all(_same_content(content, saved) for content, saved in self.sequences):
            return False
        if sum(map(len, self.holders)) != self.count:
            return False
        return not self.variables or all(variable.value is value for variable, value in self.variables)

    def _has_same_names(self) -> bool:
        """Whether there are the attributes that were there, none more, and as many modules."""
        count = sum(len(was) + len(now["_modules"]) for now, was in self.own)
        return count == len(self.values) and all(now.keys() - _NOT_ATTRIBUTES == was.keys() for now, was in self.own)

    def put_back(self) -> None:
        """Restore everything but what all modules have, such as hooks."""
        for now, was in self.own:
            for name in now.keys() - _NOT_ATTRIBUTES - was.keys():
                del now[name]
            for name, value in was.items():
                if now.get(name, _MISSING) is not value:
                    now[name] = value
        for content, saved in self.contents:
            _set_content(content, saved)
        for variable, value in self.variables:
            if variable.value is not value:
                variable.set(value)


class ModuleStates:
    """Some modules as they are now, but for their buffers: see :class:`BufferCopies`."""

    __slots__ = ("attributes", "gradients", "parameters", "tensors", "versions")

    def __init__(self, attributes: Attributes) -> None:
        self.attributes = attributes
        self.parameters: tuple[Tensor | None, ...] = tuple(map(dict.get, *attributes.parameters))
        self.tensors = [one for one in self.parameters if one is not None]
        """The parameters that there are, then the tensors among the attributes."""
        self.tensors += [tensor for _, tensor in attributes.tensors]
        self.versions = versions_of(self.tensors)
        self.gradients = list(map(_requires_grad, self.tensors))

    @property
    def generators(self) -> list[Any]:
        """From which the modules may draw random numbers."""
        return self.attributes.generators

    def put_back(self, whose: str) -> Callable[[], None]:
        """Restore the modules; returns what undoes that. RebuildError if a tensor of theirs was written to."""
        self._refuse_written(whose)
        was = self.attributes
        now = was if was.unchanged() else Attributes(was.modules, was.outside)
        others, toggled = self._others(whose), self._toggled()
        tensors = [(holder, name, holder[name]) for holder, name, _ in others]

        def undo() -> None:
            for holder, name, tensor in tensors:
                holder[name] = tensor
            for one, wanted in toggled:
                one.requires_grad_(not wanted)
            if now is not was:
                was.put_back()  # a replay may add to containers that are not there now
            if not now.unchanged():
                now.put_back()

        try:
            if now is not was:
                was.put_back()
            for one, wanted in toggled:
                one.requires_grad_(wanted)
            for holder, name, tensor in others:
                holder[name] = tensor
        except BaseException:
            undo()
            raise
        return undo

    def _refuse_written(self, whose: str) -> None:
        found = versions_of(self.tensors)
        if found == self.versions:
            return
        of_parameters = zip(self.attributes.parameters[1], self.parameters, strict=True)
        names = [name for name, one in of_parameters if one is not None]
        names += [name for name, _ in self.attributes.tensors]
        name, version, wanted = next(row for row in zip(names, found, self.versions, strict=True) if row[1] != row[2])
        raise RebuildError(
            f"{whose} cannot be recomputed: {name}, a tensor of its module, was changed in place after it ran"
            f" (version {version}, expected {wanted}); keep it"
        )

    def _toggled(self) -> list[tuple[Tensor, bool]]:
        """The parameters that were frozen or thawed since, with what they were."""
        if list(map(_requires_grad, self.tensors)) == self.gradients:
            return []
        count = len(self.tensors) - len(self.attributes.tensors)
        pairs = list(zip(self.tensors, self.gradients, strict=True))[:count]
        return [(one, was) for one, was in pairs if one.requires_grad != was and one.is_leaf]

    def _others(self, whose: str) -> list[tuple[dict[str, Any], str, Tensor]]:
        """The parameters that were replaced since."""
        if all(map(is_, map(dict.get, *self.attributes.parameters), self.parameters)):
            return []
        found: list[tuple[dict[str, Any], str, Tensor]] = []
        for holder, name, tensor in zip(*self.attributes.parameters, self.parameters, strict=True):
            if tensor is None or holder.get(name) is tensor:
                continue
            if name not in holder:
                raise RebuildError(f"{whose} cannot be recomputed: its module has no {name} any more; keep it")
            # FSDP exchanges gathered and sharded parameters by itself, and in time.
            if type(tensor) not in PLAIN or type(holder[name]) not in PLAIN:
                continue
            if tensor.numel() and not storage_bytes(tensor):
                continue
            found.append((holder, name, tensor))
        return found


_MISSING = object()
_requires_grad = attrgetter("requires_grad")


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    """A module's attributes without those that every module has."""
    return {name: value for name, value in vars(module).items() if name not in _NOT_ATTRIBUTES}


def _slots(found: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> tuple[list[dict[str, Any]], list[str]]:
    """For each name, the mapping that it is in; for ``map``, which reads them all at once."""
    pairs = [(holder, name) for holder, names in found for name in names]
    return [holder for holder, _ in pairs], [name for _, name in pairs]


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
        return all(map(is_, content.values(), saved.values())) and all(map(is_, content, saved))
    if isinstance(content, set):
        return bool(content == saved)
    return all(map(is_, content, saved))


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
        modules = [module for module in modules if buffers_of(module)]
        if not modules:
            return found
        with torch.no_grad():
            for module in modules:
                holder: dict[str, Any] = buffers_of(module)
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

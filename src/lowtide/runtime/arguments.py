"""Hold a call's arguments unchanged, although the caller, or the call itself, changes them afterwards.

Tensors tell by their version whether they were written to. Lists, mappings and objects do not: a layer may append to a
list or grow a cache of keys and values, and its caller may put the next layer's values into the same object. So a call
that is to be replayed holds copies of these, down to the tensors, which are shared; each replay gets copies of the
copies, and changes nothing that others see. The call does not hold the originals: what is put into them later may be
computed from what the call gave, and holding that would be a cycle through the graph.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from lowtide._torch_private.versions import version_of
from lowtide.errors import RebuildError

__all__ = ["Copied", "hold", "is_shared"]

_LIMIT = 20_000
"""No argument is made of more objects than this; what is further is taken as it is."""


class Copied:
    """A value of a call's arguments that can change, copied when the call began."""

    __slots__ = ("fixed", "tensors", "value")

    def __init__(self, value: Any) -> None:
        found: Iterable[Tensor] = value
        self.value = value
        if type(value) is not tuple or not all(type(item) is Tensor for item in value):  # as rotary tables are
            copier = _Copier()
            self.value, found = copier.copy(value), copier.tensors.values()
        self.fixed = self.value is value
        """Whether nothing in it can change but tensors."""
        self.tensors = [(tensor, version_of(tensor)) for tensor in found]

    def again(self, whose: str) -> Any:
        """A copy for one replay; RebuildError if a tensor in it was written to."""
        for tensor, version in self.tensors:
            if version_of(tensor) != version:
                raise RebuildError(
                    f"{whose} cannot be recomputed: a tensor of shape {tuple(tensor.shape)} in one of its arguments was"
                    f" changed in place after it ran (version {version_of(tensor)}, expected {version}); keep it"
                )
        return self.value if self.fixed else _Copier().copy(self.value)


def hold(value: Any) -> Any:
    """What a captured call holds in place of an argument that is no tensor: a copy, unless nothing can change it."""
    if is_shared(value):
        return value
    copied = Copied(value)
    return value if copied.fixed and not copied.tensors else copied


class _Copier:
    """Copies containers and objects once each, so that what was the same object is the same copy."""

    def __init__(self) -> None:
        self.copies: dict[int, tuple[Any, Any]] = {}
        self.tensors: dict[int, Tensor] = {}

    def copy(self, value: Any) -> Any:
        """The value with copies of all that can change; the value itself if nothing in it can."""
        kind = type(value)
        if kind in _ATOMS:
            return value
        if isinstance(value, Tensor):
            self.tensors[id(value)] = value
            return value
        known = self.copies.get(id(value))
        if known is not None:
            return known[1]
        if len(self.copies) >= _LIMIT or is_shared(value):
            return value
        if isinstance(value, tuple):
            return self._tuple(value)
        made = _shallow(value)
        if made is value:
            return value
        self.copies[id(value)] = (value, made)
        self._fill(made)
        return made

    def _tuple(self, value: Any) -> Any:
        items = [self.copy(item) for item in value]
        made = value
        if any(one is not other for one, other in zip(items, value, strict=True)):
            made = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        self.copies[id(value)] = (value, made)
        return made

    def _fill(self, made: Any) -> None:
        """Replace what a shallow copy holds by copies."""
        if isinstance(made, dict):
            for key in list(made):
                dict.__setitem__(made, key, self.copy(dict.__getitem__(made, key)))
        elif isinstance(made, list | deque):
            for index, item in enumerate(list(made)):
                made[index] = self.copy(item)
        attributes = getattr(made, "__dict__", None)
        if attributes is not None:
            for name, item in list(attributes.items()):
                attributes[name] = self.copy(item)
        for kind in type(made).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__") and hasattr(made, name):
                    object.__setattr__(made, name, self.copy(getattr(made, name)))


def _shallow(value: Any) -> Any:
    kind = type(value)
    if kind in _CONTAINERS:
        return copy.copy(value)
    if not hasattr(value, "__dict__") and not any("__slots__" in one.__dict__ for one in kind.__mro__):
        return value  # nothing that Python could change
    try:
        return copy.copy(value)
    except Exception:  # a class may forbid it; then there is only this one
        return value


def is_shared(value: Any) -> bool:
    """Whether a value is not an argument's own but a part of the program: a module, a class, a function, a mesh."""
    kind = type(value)
    return (
        kind in _ATOMS
        or isinstance(value, nn.Module | type | Enum)
        or callable(value)
        or kind.__module__.partition(".")[0] in _WORLDS
    )


_CONTAINERS = frozenset({list, dict, set, deque})
_ATOMS = frozenset(
    {int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, torch.Generator, slice}
)
_WORLDS = frozenset({"torch", "logging", "threading", "weakref", "multiprocessing", "concurrent", "_thread", "numpy"})

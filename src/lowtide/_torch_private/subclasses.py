"""Tensor subclasses, such as DTensor, and the plain tensors that hold their bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "PLAIN",
    "Subclass",
    "inner_tensor",
    "landed_tensor",
    "subclass_wrapper",
    "taken_apart",
]


PLAIN = frozenset({Tensor, torch.nn.Parameter})
"""The classes of tensors that hold their bytes themselves."""


def inner_tensor(tensor: Tensor) -> Tensor:
    """The plain tensor that holds the bytes: of a DTensor its local part, of a plain tensor itself."""
    while type(tensor) not in PLAIN and hasattr(tensor, "__tensor_flatten__"):
        tensor = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    return tensor


class Subclass(NamedTuple):
    """A tensor subclass, such as a DTensor, taken apart."""

    kind: type[Tensor]
    tensors: dict[str, Tensor]
    """The tensors that hold its bytes."""
    rest: dict[str, Any]
    """Its other parts, such as a device mesh."""
    context: Any
    shape: torch.Size
    stride: tuple[int, ...]

    def rebuilt(self, tensors: dict[str, Tensor]) -> Tensor:
        """The same with other tensors."""
        kind: Any = self.kind
        made: Tensor = kind.__tensor_unflatten__(self.rest | tensors, self.context, self.shape, self.stride)
        return made


def taken_apart(tensor: Tensor) -> Subclass | None:
    """A subclass in its parts; None for a tensor that has none.

    The result of a collective that may still be under way is waited for.
    """
    if type(tensor) in PLAIN or not hasattr(tensor, "__tensor_flatten__"):
        return None
    if hasattr(tensor, "trigger_wait"):
        tensor.trigger_wait()
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    tensors = {name: part for name, part in parts.items() if isinstance(part, Tensor)}
    rest = {name: part for name, part in parts.items() if name not in tensors}
    return Subclass(type(tensor), tensors, rest, context, tensor.shape, tensor.stride())


def landed_tensor(tensor: Tensor) -> Tensor:
    """As :func:`inner_tensor`, for use at once: what a collective is still bringing is waited for."""
    while (whole := taken_apart(tensor)) is not None and whole.tensors:
        tensor = next(iter(whole.tensors.values()))
    return tensor


def subclass_wrapper(tensor: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Makes of a plain tensor what ``tensor`` makes of the one that it holds; None if it is plain itself."""
    whole = taken_apart(tensor)
    if whole is None or len(whole.tensors) != 1:
        return None
    ((name, part),) = whole.tensors.items()
    below = subclass_wrapper(part)
    frame = whole._replace(tensors={})  # the wrapper must not hold the bytes
    return lambda plain: frame.rebuilt({name: plain if below is None else below(plain)})

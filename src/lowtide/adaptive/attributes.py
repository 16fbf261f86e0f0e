"""The plain attributes of a model's modules, as they were when a step began.

A step that is begun anew must find them so: a count of forwards, a running mean that is no buffer. Numbers, strings and
tensors are noted, of modules that are not torch's own. What is in lists and dictionaries is not.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from torch import Tensor, nn

from lowtide._torch_private.storages import storage_bytes
from lowtide._torch_private.versions import version_of
from lowtide.errors import RescueError

__all__ = ["Attributes"]

SMALL = 1 << 20
"""Bytes; a tensor up to this is held, so that it is there even if the step has put another in its place."""


class _NotedTensor(NamedTuple):
    """A tensor that was an attribute."""

    reference: weakref.ReferenceType[Tensor]
    held: Tensor | None
    version: int


class Attributes:
    """What the attributes of a model's modules were."""

    def __init__(self, model: nn.Module) -> None:
        own = (module for module in model.modules() if not type(module).__module__.startswith("torch.nn.modules"))
        self.noted = [(module, {name: _noted(value) for name, value in vars(module).items()}) for module in own]

    def restore(self) -> None:
        """Set them back; RescueError if one cannot be."""
        for module, noted in self.noted:
            now = vars(module)
            for name in [name for name, value in now.items() if name not in noted and _noted(value) is not _OTHER]:
                del now[name]
            for name, value in noted.items():
                if value is not _OTHER:
                    now[name] = value if type(value) is not _NotedTensor else _tensor(module, name, value)


def _noted(value: Any) -> Any:
    if type(value) in _IMMUTABLE:
        return value
    if isinstance(value, Tensor):
        held = value if storage_bytes(value) <= SMALL else None
        return _NotedTensor(weakref.ref(value), held, version_of(value))
    return _OTHER


def _tensor(module: nn.Module, name: str, noted: _NotedTensor) -> Tensor:
    tensor = noted.reference()
    if tensor is None or version_of(tensor) != noted.version:
        raise RescueError(
            f"the step cannot be repeated: it has changed the tensor {name!r} of a {type(module).__name__}, which is no"
            " buffer; register it as one, or begin again from the last checkpoint"
        )
    return tensor


_IMMUTABLE = (bool, int, float, complex, str, bytes, type(None))
_OTHER = object()
"""Stands for what is not noted."""

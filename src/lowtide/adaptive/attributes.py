"""A snapshot of the plain attributes of a model's modules, for a step that may be retried.

A retried step must find them unchanged: a count of forwards, a running mean that is not a buffer. The snapshot holds
numbers, strings and tensors of modules that are not torch's own, and not the contents of lists and dictionaries. The
runtime's :class:`lowtide.runtime.module_state.Attributes` holds those too, but would keep every tensor, however large,
alive for the whole step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn

from lowtide._torch_private.compiled import dict_version
from lowtide._torch_private.storages import storage_bytes
from lowtide._torch_private.versions import version_of
from lowtide.errors import RescueError

__all__ = ["AttributeSnapshot"]

SMALL = 1 << 20
"""Bytes; a tensor up to this is kept alive, so that it can be restored if the step has replaced it."""


class _TensorAttribute(NamedTuple):
    """An attribute that is a tensor."""

    reference: weakref.ReferenceType[Tensor]
    held: Tensor | None
    version: int


class _Module(NamedTuple):
    """The plain attributes of one module."""

    version: int
    """Of its dictionary, which counts what is put into it."""
    saved: dict[str, Any]
    tensors: bool
    """Whether tensors are among them, which may change by themselves."""


class AttributeSnapshot:
    """The plain attributes of a model's modules. Those that have not changed since ``last`` are taken from there."""

    def __init__(self, modules: Iterable[nn.Module], last: AttributeSnapshot | None = None) -> None:
        known = last.modules if last is not None else {}
        self.modules: dict[nn.Module, _Module] = {}
        for module in modules:
            if type(module).__module__.startswith("torch.nn.modules"):
                continue
            found = known.get(module)
            if found is None or found.tensors or found.version != dict_version(vars(module)):
                saved = {name: _snapshot(value) for name, value in vars(module).items()}
                tensors = any(type(value) is _TensorAttribute for value in saved.values())
                found = _Module(dict_version(vars(module)), saved, tensors)
            self.modules[module] = found
        self.has_tensors = any(one.tensors for one in self.modules.values())
        """Whether there are tensors among them: then another step needs another snapshot."""

    def restore(self) -> None:
        """Restore them; RescueError if a tensor was written to, or is gone."""
        for module, (_, saved, _) in self.modules.items():
            now = vars(module)
            for name in [name for name, value in now.items() if name not in saved and _snapshot(value) is not _OTHER]:
                del now[name]
            for name, value in saved.items():
                if value is not _OTHER:
                    now[name] = value if type(value) is not _TensorAttribute else _tensor(module, name, value)


def _snapshot(value: Any) -> Any:
    if type(value) in _IMMUTABLE:
        return value
    if isinstance(value, Tensor):
        held = value if storage_bytes(value) <= SMALL else None
        return _TensorAttribute(weakref.ref(value), held, version_of(value))
    return _OTHER


def _tensor(module: nn.Module, name: str, saved: _TensorAttribute) -> Tensor:
    tensor = saved.reference()
    if tensor is None or version_of(tensor) != saved.version:
        raise RescueError(
            f"the step cannot be retried: it has changed the tensor {name!r} of a {type(module).__name__}, which is not"
            " a buffer; register it as one, or start again from the last checkpoint"
        )
    return tensor


_IMMUTABLE = (bool, int, float, complex, str, bytes, type(None))
_OTHER = object()
"""Marks an attribute that is not in the snapshot."""

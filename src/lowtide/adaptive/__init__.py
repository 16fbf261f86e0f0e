"""Profile, plan and switch while training, and survive out of memory. :func:`lowtide.adapt` is its one call."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowtide.adaptive.session import Adaptive

__all__ = ["Adaptive"]

_MODULES = {"Adaptive": "session"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

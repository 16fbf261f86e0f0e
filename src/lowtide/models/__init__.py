"""Reference models whose operators have the names of the MindSpore Transformers guide."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowtide.models.chunked_loss import chunked_cross_entropy

__all__ = ["chunked_cross_entropy"]

_MODULES = {"chunked_cross_entropy": "chunked_loss"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

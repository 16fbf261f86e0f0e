"""Carries a Policy out on a live model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowtide.runtime.apply import Handle
    from lowtide.runtime.limits import Limits
    from lowtide.runtime.receipt import Receipt
    from lowtide.runtime.verify import Verification

__all__ = ["Handle", "Limits", "Receipt", "Verification"]

_MODULES = {"Handle": "apply", "Limits": "limits", "Receipt": "receipt", "Verification": "verify"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

"""Autocast: read in forward, restored for a recompute in backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import TypeAlias

import torch

from lowtide._torch_private.needed import needed_for

with needed_for("recompute under autocast"):
    from torch._C import _is_any_autocast_enabled as is_any_autocast_enabled

__all__ = [
    "AutocastState",
    "autocast_contexts",
    "autocast_state",
    "is_any_autocast_enabled",
]


AutocastState: TypeAlias = tuple[tuple[str, torch.dtype | None], ...]
"""For each kind of device what autocast casts to, None where it is off; empty if it is off everywhere."""


def autocast_state() -> AutocastState:
    """How autocast is set now."""
    kinds = _device_kinds()
    for kind in kinds:
        if torch.is_autocast_enabled(kind):
            enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
            return tuple((kind, dtype(kind) if enabled(kind) else None) for kind in kinds)
    return ()


def autocast_contexts(state: AutocastState) -> list[AbstractContextManager[None]]:
    """Contexts that restore autocast.

    Weights that it has cast for others stay as they are, also where a layer has an autocast of its own inside. Where
    autocast is not set like that now none are added: no context would throw them away before weights are updated.
    """
    now = autocast_state()
    if now == state:
        return [_casts_left_alone()] if state else []
    was, current = dict(state), dict(now)
    return [
        _casts_left_alone(),
        *(
            torch.autocast(kind, dtype=was.get(kind), enabled=was.get(kind) is not None, cache_enabled=False)
            for kind in _device_kinds()
            if was.get(kind) != current.get(kind)
        ),
    ]


@contextmanager
def _casts_left_alone() -> Iterator[None]:
    """The outermost autocast of a thread throws all threads' cast weights away when it ends: be one further out."""
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()


@cache
def _device_kinds() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)

"""GradScaler: which one is calling, and what it remembers of a step that is retried."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType

import torch

from lowtide._torch_private.needed import needed_for

__all__ = [
    "calling_scaler",
    "forget_unscaling",
]


def forget_unscaling(scalers: Iterable[torch.amp.GradScaler], optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Let GradScalers forget that they have unscaled gradients in these optimizers' step, which is retried."""
    keys = [id(optimizer) for optimizer in optimizers]
    for scaler in scalers:
        if scaler.is_enabled():
            with needed_for("retrying a step with a GradScaler"):
                states = scaler._per_optimizer_states
            for key in keys:
                states.pop(key, None)


def calling_scaler() -> torch.amp.GradScaler | None:
    """The GradScaler that this is called by, through whatever is between; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
            scaler = frame.f_locals.get("self")
            if isinstance(scaler, torch.amp.GradScaler):
                return scaler
        frame = frame.f_back
    return None

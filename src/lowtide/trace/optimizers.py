"""The optimizers that a Trace can have without a run of its own: torch's, one kernel for many parameters."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch

__all__ = ["OptimizerName", "make_optimizer"]

OptimizerName: TypeAlias = Literal["adamw", "adam", "sgd", "momentum", "none"]


def make_optimizer(name: OptimizerName, parameters: Any) -> torch.optim.Optimizer | None:
    """The optimizer of a name, for parameters or groups of them; None for ``none``."""
    if name == "none":
        return None
    if name == "adamw":
        return torch.optim.AdamW(parameters, fused=True)
    if name == "adam":
        return torch.optim.Adam(parameters, fused=True)
    return torch.optim.SGD(parameters, momentum=0.9 if name == "momentum" else 0.0, fused=True)

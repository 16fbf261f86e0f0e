"""What routed experts compute: the products that really run, counted by the dispatcher."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["GroupedWork"]


class GroupedWork(TorchDispatchMode):
    """Counts the FLOPs of grouped products while it is on, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            first, second = args[:2]
            # Rows of all groups, or with two matrices the sum over the rows of each group.
            self.flops += 2 * first.shape[-2] * first.shape[-1] * second.shape[-1]
        return func(*args, **(kwargs or {}))

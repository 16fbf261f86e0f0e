"""What all ranks decide together, over a gloo group of their own; in a single process each answer is that process's."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

__all__ = ["Agreement"]

Value = TypeVar("Value")


class Agreement:
    """A gloo group over all ranks. Every rank makes one, and calls the same methods in the same order."""

    def __init__(self, timeout: timedelta) -> None:
        self.group = dist.new_group(backend="gloo", timeout=timeout) if dist.is_initialized() else None
        if self.group is None:
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a single process is what is meant
        self.rank = dist.get_rank() if self.group is not None else 0
        self.world_size = dist.get_world_size() if self.group is not None else 1

    @property
    def alone(self) -> bool:
        """Whether there is no process group."""
        return self.group is None

    def all(self, mine: bool) -> bool:
        """Whether it is so on every rank."""
        return not self.any_of([not mine])[0]

    def any_of(self, mine: list[bool]) -> list[bool]:
        """For each place of a list as long on every rank: whether it is so on any."""
        flags = torch.tensor(mine, dtype=torch.uint8)
        if self.group is not None and mine:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in flags.tolist()]

    def from_first(self, value: Value) -> Value:
        """Rank 0's value on every rank."""
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def close(self) -> None:
        """Give the group back."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None

"""What all ranks decide together, over a gloo group of their own; a single process decides by itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

__all__ = ["Agreement"]

Value = TypeVar("Value")


class Agreement:
    """A gloo group of all ranks, or of some.

    Every rank constructs it, also those that are not members; the members call the same methods in the same order.
    With ``alone``, each rank decides by itself, as a single process does.
    """

    def __init__(self, timeout: timedelta, ranks: Sequence[int] | None = None, *, alone: bool = False) -> None:
        self.group: dist.ProcessGroup | None = None
        if dist.is_initialized() and not alone:
            group = dist.new_group(list(ranks) if ranks else None, timeout=timeout, backend="gloo")
            self.group = group if isinstance(group, dist.ProcessGroup) else None
        if self.group is None:
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a single process is fine
        self.rank = dist.get_rank() if self.group is not None else 0
        self.ranks = tuple(ranks or range(dist.get_world_size() if self.group is not None else 1))

    @property
    def world_size(self) -> int:
        """The number of ranks in the group."""
        return len(self.ranks)

    @property
    def alone(self) -> bool:
        """Whether there is no process group."""
        return self.group is None

    def all(self, mine: bool) -> bool:
        """Whether ``mine`` is true on every rank."""
        return not self.any_of([not mine])[0]

    def any_of(self, mine: list[bool]) -> list[bool]:
        """For each index of a list that is as long on every rank: whether it is true on any."""
        flags = torch.tensor(mine, dtype=torch.uint8, device="cpu")
        if self.group is not None and mine:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in flags.tolist()]

    def from_first(self, value: Value) -> Value:
        """The first rank's value on every rank."""
        return self.from_rank(value, self.ranks[0])

    def from_rank(self, value: Value, rank: int) -> Value:
        """That rank's value on every rank."""
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=rank, group=self.group)
        return box[0]

    def merged(self, mine: Value, merge: Callable[[Value, Value], Value]) -> Value:
        """All values as one, on every rank: neighbours merge in pairs, then pairs of these, and so on.

        A rank sends its value once and receives one for each time the number of ranks can be halved; the first
        rank sends the result to all. ``merge`` gets values of ranks in their order.
        """
        place, distance = self.ranks.index(self.rank), 1
        while distance < self.world_size:
            box = [mine]
            if place % (2 * distance):
                dist.send_object_list(box, self.ranks[place - distance], group=self.group)
                break
            if place + distance < self.world_size:
                dist.recv_object_list(box, self.ranks[place + distance], group=self.group)
                mine = merge(mine, box[0])
            distance *= 2
        return self.from_first(mine)

    def largest(self, mine: Sequence[float]) -> list[float]:
        """For each index of a list that is as long on every rank: the largest number of any."""
        numbers = torch.tensor(mine, dtype=torch.float64, device="cpu")
        if self.group is not None and numbers.numel():
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group)
        found: list[float] = numbers.tolist()
        return found

    def of_every_rank(self, mine: int) -> list[int]:
        """Each rank's number, in the order of ranks."""
        if self.group is None:
            return [mine]
        found = torch.empty(len(self.ranks), dtype=torch.int64, device="cpu")
        dist.all_gather_single(found, torch.tensor([mine], dtype=torch.int64, device="cpu"), group=self.group)
        return [int(number) for number in found.tolist()]

    def close(self) -> None:
        """Destroy the group."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None

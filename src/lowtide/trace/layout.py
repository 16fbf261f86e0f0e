"""How the ranks of a run share the work, and on which nodes they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from lowtide.errors import TraceError

__all__ = ["Layout", "group_channel", "stride_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How many ways the work is shared; the product of all but the last is the number of ranks.

    Neighbouring ranks share a layer's matrices, then samples, then parameters, then copies; pipeline stages lie
    farthest apart.
    """

    replicate: int = 1
    """Copies of the whole model (DDP), or of the groups that share it (HSDP)."""
    shard: int = 1
    """Ranks with other samples that share parameters, gradients and optimizer states (FSDP)."""
    pipeline: int = 1
    """Pipeline stages."""
    tensor: int = 1
    """Ranks that share each layer's matrices."""
    context: int = 1
    """Ranks that have some tokens each of the same samples."""
    expert: int = 1
    """Ranks, among those that share the data, that share the experts of each layer."""

    @property
    def data(self) -> int:
        """Ranks that each see other samples."""
        return self.replicate * self.shard

    @property
    def sharded(self) -> int:
        """Ranks over which FSDP shards: those that have other samples or other tokens."""
        return self.shard * self.context

    @property
    def stage(self) -> int:
        """Ranks of one pipeline stage."""
        return self.data * self.context * self.tensor

    @property
    def world(self) -> int:
        """All ranks."""
        return self.stage * self.pipeline

    def crosses_nodes(self, stage: int, other: int, devices_per_node: int) -> bool:
        """Whether some rank of a pipeline stage and its counterpart in another are on different nodes.

        >>> Layout(shard=2, tensor=2).crosses_nodes(0, 1, 8)  # ranks 0 to 3 send to 4 to 7
        False
        >>> Layout(shard=2, tensor=2).crosses_nodes(1, 2, 8)
        True
        """
        if self.stage >= devices_per_node:
            return stage != other
        pairs = ((stage * self.stage + rank, other * self.stage + rank) for rank in range(self.stage))
        return any(first // devices_per_node != second // devices_per_node for first, second in pairs)

    def as_json(self) -> dict[str, int]:
        """The degrees by name."""
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Layout | None:
        """The reverse of :meth:`as_json`; nothing for nothing."""
        known = {one.name for one in fields(Layout)}
        if unknown := set(value) - known:
            raise TraceError(f"a layout has {', '.join(sorted(known))}; found also {', '.join(sorted(unknown))}")
        return Layout(**value) if value else None


def stride_of(ranks: Sequence[int]) -> int:
    """How far apart neighbours of a group are: 1 for 4, 5, 6, 7, and 8 for 0, 8, 16.

    Groups of a mesh have one distance; of another group it is the mean, rounded up.

    >>> stride_of([0, 8, 16]), stride_of([3])
    (8, 1)
    """
    return max(1, -(-(max(ranks) - min(ranks)) // (len(ranks) - 1))) if len(ranks) > 1 else 1


def group_channel(ranks: int, stride: int) -> str:
    """What a stream waits for that waits for a collective of such a group.

    >>> group_channel(8, 4)
    'group 8:4'
    """
    return f"group {ranks}:{stride}"

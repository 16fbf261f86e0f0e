"""The embedding's weights where two pipeline stages use them: a head that shares them, or multi-token prediction.

The first stage and the last have a copy each, made from the same seed or checkpoint. A step's gradient is the sum of
both; with that sum, and the same optimizer, the copies stay equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from lowtide.models.decoder import Decoder

__all__ = ["TiedWeights"]


class TiedWeights:
    """This rank's copy, if it has one. All ranks of a pipeline make it; ``pipeline`` is their group."""

    def __init__(self, parts: Sequence[nn.Module], pipeline: ProcessGroup) -> None:
        self.parameter: Tensor | None = None
        self.first = False
        self.group: ProcessGroup | None = None
        for part in parts:
            if isinstance(part, Decoder) and part.embedding is not None:
                self.parameter, self.first = part.embedding.weight, part.first
        if self.parameter is not None:
            ranks = dist.get_process_group_ranks(pipeline)
            group = dist.new_group([ranks[0], ranks[-1]], use_local_synchronization=True)
            assert isinstance(group, ProcessGroup)  # this rank is a member
            self.group = group

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter of this rank counts in the norm of the job: of both copies, the first stage's does."""
        return parameter is not self.parameter or self.first

    def reduce(self) -> None:
        """Add up the gradients of both copies, once all micro-batches are through."""
        if self.parameter is None or self.group is None:
            return
        parameter, gradient = self.parameter, self.parameter.grad
        assert gradient is not None  # every micro-batch goes through both
        if isinstance(gradient, DTensor):
            assert isinstance(parameter, DTensor)
            if gradient.placements != parameter.placements:  # an embedding's may be whole on each tensor-parallel rank
                gradient = parameter.grad = gradient.redistribute(placements=parameter.placements)
            gradient = gradient.to_local()
        dist.all_reduce(gradient, group=self.group)

"""The loss of a micro-batch, weighed so that all micro-batches of all ranks add up to the step's loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from lowtide.train.data.sample import LEFT_OUT
from lowtide.train.run import Run

__all__ = ["Objective"]


class Objective:
    """The mean of the micro losses, or with ``per_token_loss`` the mean over all tokens of the step.

    Data parallel averages gradients over its ranks; the weights here are such that the average comes out right, also
    where ranks have different numbers of tokens.
    """

    def __init__(self, run: Run, data: dist.ProcessGroup) -> None:
        self.run, self.data = run, data
        self.ranks = run.degrees.data if run.update.sum_gradients else 1
        self.per_token: Tensor | None = None
        self.scale = 1.0

    def begin(self, labels: Sequence[Tensor], scale: float) -> None:
        """A step begins: ``labels`` of all its micro-batches on this rank, and the factor on the loss."""
        self.scale = scale
        if self.run.update.per_token_loss:
            tokens = torch.stack([(one != LEFT_OUT).sum() for one in labels]).sum().to(torch.float32)
            dist.all_reduce(tokens, group=self.data)
            self.per_token = self.run.degrees.data / tokens.clamp(min=1)

    @property
    def weight(self) -> float:
        """What the mean loss of a micro-batch is multiplied by."""
        return self.scale * self.ranks / self.run.micro_steps

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The weighed loss of one micro-batch; its backward gives the gradients."""
        flat = labels.flatten()
        total = functional.cross_entropy(logits.flatten(0, -2).float(), flat, ignore_index=LEFT_OUT, reduction="sum")
        if self.per_token is not None:
            return total * self.per_token * (self.scale * self.ranks)
        return total / (flat != LEFT_OUT).sum().clamp(min=1) * self.weight

    def value(self, losses: Tensor) -> Tensor:
        """What the sum of this rank's weighed losses means: its share of the step's loss, before any scaling."""
        return losses.detach() / (self.scale * self.ranks)

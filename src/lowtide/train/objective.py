"""The loss of a micro-batch, weighed so that all micro-batches of all ranks add up to the step's loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowtide.models.head import Head
from lowtide.models.sharded_loss import LEFT_OUT, summed_cross_entropy
from lowtide.train.run import Run

__all__ = ["Objective"]


class Objective:
    """The mean of the micro losses, or with ``per_token_loss`` the mean over all tokens of the step.

    Data parallel averages gradients over its ranks; the weights here are such that the average comes out right, also
    where ranks have different numbers of tokens.

    ``parts`` are this rank's parts of the model; a head among them says what of the logits it gives. Under context
    parallel a rank has ``place`` among those that have some tokens each of the same samples.
    """

    def __init__(self, run: Run, data: dist.ProcessGroup, parts: Sequence[nn.Module] = (), place: int = 0) -> None:
        self.run, self.data, self.place = run, data, place
        self.head = next((one for part in parts for one in part.modules() if isinstance(one, Head)), None)
        self.ranks = run.degrees.data if run.update.sum_gradients else 1
        self.per_token: Tensor | None = None
        self.scale = 1.0

    def begin(self, labels: Sequence[Tensor], scale: float) -> None:
        """A step begins: ``labels`` of all its micro-batches on this rank, and the factor on the loss."""
        self.scale = scale
        if self.run.update.per_token_loss:
            tokens = torch.stack([(self.own(one) != LEFT_OUT).sum() for one in labels]).sum().to(torch.float32)
            dist.all_reduce(tokens, group=self.data)
            self.per_token = self.run.degrees.data * self.run.degrees.context / tokens.clamp(min=1)

    def own(self, tokens: Tensor) -> Tensor:
        """Those of ``tokens``, ``[batch, sequence]``, that this rank has."""
        ranks = self.run.degrees.context
        return tokens if ranks == 1 else tokens.chunk(ranks, 1)[self.place].contiguous()

    @property
    def weight(self) -> float:
        """What the mean loss of a micro-batch is multiplied by."""
        return self.scale * self.ranks / self.run.micro_steps

    def arguments(self, labels: Tensor) -> dict[str, Tensor]:
        """What the model needs besides the tokens: the labels, where its head computes the loss."""
        return {"labels": self.own(labels)} if self.head is not None and self.head.chunked else {}

    def __call__(self, output: Tensor, labels: Tensor) -> Tensor:
        """The weighed loss of one micro-batch; its backward gives the gradients.

        ``output`` is what the model gives for this rank's tokens: logits, all of them or this rank's share, or the sum
        of the losses. ``labels`` are those of whole samples.
        """
        total = output
        if output.dim():
            total = summed_cross_entropy(output, self.own(labels), self.head.share if self.head is not None else None)
        if self.per_token is not None:
            return total * self.per_token * (self.scale * self.ranks)
        # The average over ranks is over those, too, that have other tokens of these samples.
        return total / (labels != LEFT_OUT).sum().clamp(min=1) * (self.weight * self.run.degrees.context)

    def value(self, losses: Tensor) -> Tensor:
        """What the sum of this rank's weighed losses means: its share of the step's loss, before any scaling."""
        return losses.detach() / (self.scale * self.ranks)

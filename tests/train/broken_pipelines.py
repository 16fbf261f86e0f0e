"""Steps of a pipeline that are broken off in the middle, on all of its ranks, and run again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from lowtide.train.pipeline import Pipeline, Stage

MICRO_BATCHES, WIDTH = 4, 8
SCHEDULES: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
}


class _Layer(nn.Module):
    """A layer that runs out of memory once, in one of its forwards or backwards."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear, self.left = nn.Linear(WIDTH, WIDTH), -1

    def forward(self, given: Tensor) -> Tensor:
        if self.left == 0:
            self.left = -1
            raise torch.OutOfMemoryError("told to fail")
        self.left -= 1
        return self.linear(given).tanh()


def run(schedule: str, fails: list[int | None]) -> tuple[list[Tensor], list[Tensor]]:
    """The losses and gradients of two steps, the first broken off in a forward of each chunk, counted from zero."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunks = len(fails) // ranks
    stages = [Stage(chunk * ranks + rank, len(fails), ()) for chunk in range(chunks)]
    layers = [_Layer(stage.number) for stage in stages]
    # The ranks are used again, and what an aborted step had sent stays in the group it was sent in.
    group: Any = dist.new_group(use_local_synchronization=True)
    sample = torch.empty(1, WIDTH, device="meta", requires_grad=True)
    made = [
        PipelineStage(
            layer, stage.number, stage.total, torch.device("cpu"), input_args=(sample,), output_args=(sample,),
            group=group,
        )
        for layer, stage in zip(layers, stages, strict=True)
    ]  # fmt: skip
    kind = SCHEDULES[schedule]
    given = made if chunks > 1 else made[0]
    pipeline = Pipeline(kind(given, n_microbatches=MICRO_BATCHES, loss_fn=_loss, scale_grads=False), stages, group)
    losses, gradients = [], []
    torch.manual_seed(0)
    batches = [(torch.randn(MICRO_BATCHES, WIDTH), torch.randn(MICRO_BATCHES, WIDTH)) for _ in range(2)]
    for tokens, labels in batches:
        if any(one is not None for one in fails):
            for layer, stage in zip(layers, stages, strict=True):
                told = fails[stage.number]
                layer.left = -1 if told is None else told
            with pytest.raises((torch.OutOfMemoryError, RuntimeError)) as error:
                pipeline.run(tokens, labels)
            # Whoever drops the error drops the frames that hold what is being sent, and gloo takes back what has not
            # been sent: the other rank, which waits for it, would never be broken off.
            dist.barrier()
            del error
            for layer in layers:
                layer.zero_grad()
                layer.left = -1
            pipeline.drop_attempt()
        loss = pipeline.run(tokens, labels)
        losses += [loss] if loss is not None else []
        gradients += [one.grad.clone() for layer in layers for one in layer.parameters() if one.grad is not None]
        for layer in layers:
            layer.zero_grad()
    return losses, gradients


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def same(schedule: str, fails: list[int | None]) -> bool:
    """Whether steps that are broken off come to what undisturbed ones do; ``fails`` has all chunks, in their order."""
    undisturbed, disturbed = run(schedule, [None] * len(fails)), run(schedule, fails)
    assert len(undisturbed[1]) == 4 * len(fails) // dist.get_world_size()  # weights and biases of two steps
    return all(
        len(one) == len(other) and all(map(torch.equal, one, other))
        for one, other in zip(undisturbed, disturbed, strict=True)
    )

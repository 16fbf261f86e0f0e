"""Pipeline stages: which part of the model this rank has, and the order of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from lowtide._torch_private.training.resets import reset_pipeline, use_group
from lowtide.config.placement import Placement
from lowtide.errors import ConfigError
from lowtide.planner import pipeline as plan
from lowtide.train.run import Run, Schedule

__all__ = ["Pipeline", "Stage", "make_pipeline", "planned_pipeline", "stages_of"]

_SCHEDULES: dict[Schedule, Any] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble_v": ScheduleZBVZeroBubble,
}


class Stage(NamedTuple):
    """One part of the model in the order the data runs through them: a chunk of a pipeline stage."""

    number: int
    """Its place in that order."""
    total: int
    """All parts of the model."""
    layers: tuple[int, ...]
    """Its layers; the first and the last part may have none."""

    @property
    def first(self) -> bool:
        """Whether it has the embedding."""
        return self.number == 0

    @property
    def last(self) -> bool:
        """Whether it has the head."""
        return self.number == self.total - 1


def stages_of(placement: Placement, rank: int) -> tuple[Stage, ...]:
    """The parts of the model that pipeline rank ``rank`` has, first to last."""
    stages, chunks = placement.num_stages, placement.num_chunks
    found = []
    for chunk in range(chunks):
        column = stages - 1 - rank if placement.folded and chunk % 2 else rank
        layers = tuple(
            layer
            for layer, place in enumerate(zip(placement.columns, placement.chunks, strict=True))
            if place == (column, chunk)
        )
        found.append(Stage(chunk * stages + column, stages * chunks, layers))
    return tuple(found)


def planned_pipeline(run: Run) -> plan.Pipeline:
    """The pipeline of a run as the planner sees it: all stages, each with its parts."""
    return plan.Pipeline(
        placement=tuple(
            tuple(stage.layers for stage in stages_of(run.placement, rank)) for rank in range(run.placement.num_stages)
        ),
        micro_batches=run.micro_steps,
        schedule=run.schedule,
    )


class Pipeline:
    """This rank's stages and their schedule."""

    def __init__(self, schedule: Any, stages: Sequence[Stage], group: ProcessGroup) -> None:
        self.schedule, self.group = schedule, group
        self.first = any(stage.first for stage in stages)
        self.last = any(stage.last for stage in stages)

    def drop_attempt(self) -> None:
        """Forget an aborted step. All ranks of the pipeline do so together.

        What one rank had sent and another had not yet received would be received in place of the next step's: they go
        on in a group of their own. The old one keeps its connections until the process ends.
        """
        reset_pipeline(self.schedule)
        if self.group.size() > 1:
            ranks = dist.get_process_group_ranks(self.group)
            group = dist.new_group(ranks, use_local_synchronization=True)
            assert isinstance(group, ProcessGroup)  # this rank is a member
            use_group(self.schedule, group)

    def run(self, tokens: Tensor, labels: Tensor, more: Mapping[str, Tensor] | None = None) -> Tensor | None:
        """Forward and backward of all micro-batches; the sum of their losses, on the rank that has the last stage.

        ``more`` is what the parts of this rank are given besides their input.
        """
        losses: list[Tensor] = []
        given = (tokens,) if self.first else ()
        if not self.last:
            self.schedule.step(*given)
            return None
        self.schedule.step(*given, target=labels, losses=losses, return_outputs=False, **(more or {}))
        return torch.stack(losses).sum()


def make_pipeline(
    run: Run,
    modules: Sequence[torch.nn.Module],
    stages: Sequence[Stage],
    group: ProcessGroup,
    device: torch.device,
    shapes: Callable[[Stage], tuple[Tensor, Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Pipeline:
    """The schedule over ``modules``; ``shapes`` gives a stage's input and output as tensors on meta.

    With the shapes known torch need not run the model once to find them, which would draw random numbers.
    """
    made = []
    for module, stage in zip(modules, stages, strict=True):
        given, output = shapes(stage)
        made.append(
            PipelineStage(
                module, stage.number, stage.total, device, input_args=(given,), output_args=(output,), group=group
            )
        )
    kind = _SCHEDULES[run.schedule]
    single = issubclass(kind, PipelineScheduleSingle)
    try:
        schedule = kind(made[0] if single else made, n_microbatches=run.micro_steps, loss_fn=loss, scale_grads=False)
    except ValueError as error:
        raise ConfigError(
            f"the schedule {run.schedule} cannot run {run.micro_steps} micro-batches over {run.degrees.pipeline} stages"
            f" x {run.placement.num_chunks} chunks: {error}; change parallel_config.micro_batch_num"
        ) from error
    return Pipeline(schedule, stages, group)

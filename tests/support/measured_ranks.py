"""Ranks that train the reference decoder on tide and are looked on: the Trace of each."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import tide
from lowtide._torch_private.subclasses import inner_tensor
from lowtide.adaptive.step_profiler import TIMED_STEPS, StepProfiler
from lowtide.policy import LayerPolicy, Policy
from lowtide.train.mesh import make_meshes
from lowtide.train.traced import TracedRank, _groups
from support.garbage import collect_garbage
from support.predicted_ranks import built, pipeline_of, step_of

__all__ = ["Shown", "measured_trace"]


class Shown(NamedTuple):
    """What a rank showed."""

    trace: str
    """Its Trace as JSON."""
    same: bool
    """Whether looking on changed no bit of its parameters."""
    seconds: float
    """Of a step that is not measured."""


def measured_trace(rank: TracedRank) -> Shown:
    """Train twice on this rank, the second time measured."""
    tide.configure(poison=False)
    plain, seconds, _ = _trained(rank, watched=False)
    watched, _, measuring = _trained(rank, watched=True)
    return Shown(json.dumps(measuring.trace().as_json()), all(map(torch.equal, plain, watched)), seconds)


def _trained(rank: TracedRank, *, watched: bool) -> tuple[list[Tensor], float, StepProfiler]:
    device, stages = torch.device("tide", 0), rank.degrees.pipeline
    pipeline = pipeline_of(rank)
    with built(rank, Policy((LayerPolicy(),) * rank.shape.num_layers), pipeline, device) as models:
        (model,) = models
    optimizer = torch.optim.AdamW(_groups(model), fused=True)
    step = step_of([model], rank, pipeline, device)
    last = make_meshes(rank.degrees, device).pipeline.get_local_rank() == stages - 1
    measuring = StepProfiler(model, optimizers=[optimizer], layers="layers", last=last)
    collect_garbage()
    begin = 0
    for _ in range(TIMED_STEPS + 1):
        torch.accelerator.synchronize()
        dist.barrier()
        begin = tide.now()
        with measuring.step() if watched else nullcontext():
            step()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    torch.accelerator.synchronize()
    seconds = (tide.now() - begin) / 1e9
    return [inner_tensor(parameter.detach()).cpu().clone() for parameter in model.parameters()], seconds, measuring

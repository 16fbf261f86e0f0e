"""Ranks that train the reference decoder: what each one's memory and time are predicted to be, and are on tide."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

import tide
from lowtide.cost.devices import find_device
from lowtide.cost.imagined import device_kernels
from lowtide.models.build import build_model
from lowtide.models.decoder import Decoder
from lowtide.models.head import Head
from lowtide.models.initialise import initialise
from lowtide.models.moe import Plan
from lowtide.planner.pipeline import Pipeline, even_pipeline
from lowtide.planner.schedule import position
from lowtide.planner.simulate import simulate
from lowtide.policy import LayerPolicy, Policy
from lowtide.runtime.apply import Handle, apply
from lowtide.train.mesh import make_meshes
from lowtide.train.parallel import (
    apply_context_parallel,
    apply_expert_parallel,
    apply_fsdp,
    apply_tensor_parallel,
)
from lowtide.train.pipeline import _SCHEDULES
from lowtide.train.traced import TracedRank, _groups, mean_loss, trace_rank, traced_loss
from support.garbage import collect_garbage

__all__ = ["Measured", "measured_peaks", "measured_steps", "pipeline_of", "predicted_peaks"]

MICRO_BATCHES = 4
"""Micro-batches of a pipeline's step; without stages there is one."""


class Measured(NamedTuple):
    """What a warm step of this rank took."""

    peak: int
    seconds: float


def pipeline_of(rank: TracedRank) -> Pipeline:
    """Its stages under 1F1B, or one stage and one micro-batch."""
    stages = rank.degrees.pipeline
    return even_pipeline(rank.shape.num_layers, stages=stages, micro_batches=MICRO_BATCHES if stages > 1 else 1)


def predicted_peaks(rank: TracedRank, policies: Sequence[Policy], pipeline: Pipeline | None = None) -> list[list[int]]:
    """For each Policy the peak of each pipeline stage, the batch that a caller gives included."""
    with device_kernels("other"):
        trace = trace_rank(rank)
    pipeline, device = pipeline or pipeline_of(rank), find_device("h100")
    given = given_bytes(rank, pipeline)
    return [[stage.peak + given for stage in simulate(trace, policy, device, pipeline).stages] for policy in policies]


def given_bytes(rank: TracedRank, pipeline: Pipeline) -> int:
    """The tokens of a step, as they are allocated."""
    return (rank.samples * rank.sequence // rank.degrees.context * 8 * pipeline.micro_batches + 511) // 512 * 512


def measured_peaks(rank: TracedRank, policies: Sequence[Policy], pipeline: Pipeline | None = None) -> list[int]:
    """This rank's peak in a warm step on tide, for each Policy."""
    tide.configure(races=False, poison=False)
    return [one.peak for one in measured_steps(rank, policies, pipeline)]


def measured_steps(rank: TracedRank, policies: Sequence[Policy], pipeline: Pipeline | None = None) -> list[Measured]:
    """A warm step of this rank on tide, for each Policy."""
    pipeline = pipeline or pipeline_of(rank)
    return [_measured(rank, policy, pipeline) for policy in policies]


def measured_skew(rank: TracedRank) -> tuple[float, ...]:
    """How many times an even share of the tokens this rank's experts get in each layer, as routers report it in the
    step that is measured."""
    pipeline, device = pipeline_of(rank), torch.device("tide", 0)
    found = [1.0] * rank.shape.num_layers
    with built(rank, Policy((LayerPolicy(),) * rank.shape.num_layers), pipeline, device) as models:
        for number, layer in enumerate(models[0].layers.values()):
            for module in layer.modules():
                if isinstance(module, Plan):
                    module.register_forward_hook(partial(_note, found, number))
        for _ in _steps(models, rank, pipeline, device):
            pass
    return tuple(found)


def _note(found: list[float], layer: int, _: nn.Module, __: object, planned: Any) -> None:
    found[layer] = sum(planned.received) / sum(planned.sent)


def _measured(rank: TracedRank, policy: Policy, pipeline: Pipeline) -> Measured:
    device = torch.device("tide", 0)
    with built(rank, policy, pipeline, device) as models:
        *_, last = _steps(models, rank, pipeline, device)
        return last


def _steps(models: list[Any], rank: TracedRank, pipeline: Pipeline, device: torch.device) -> Iterator[Measured]:
    """Three steps: one learns, one is warm, and one is to be looked at."""
    optimizer = torch.optim.AdamW(_groups(nn.ModuleList(models)), fused=True)
    step = step_of(models, rank, pipeline, device)
    collect_garbage()  # an earlier model may still be there
    for _ in range(3):
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        dist.barrier()
        begin = tide.now()
        step()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.accelerator.synchronize()
        yield Measured(torch.accelerator.max_memory_allocated(), (tide.now() - begin) / 1e9)


@contextmanager
def built(rank: TracedRank, policy: Policy, pipeline: Pipeline, device: torch.device) -> Iterator[list[Any]]:
    """This rank's chunks of the model, as the runner builds them."""
    meshes = make_meshes(rank.degrees, device)
    stage, total = meshes.pipeline.get_local_rank(), pipeline.stages * pipeline.chunks
    models: list[Any] = []
    handles: list[Handle] = []
    for chunk, mine in enumerate(pipeline.placement[stage]):
        place = position(pipeline, stage, chunk)
        with torch.device("meta"):
            model = build_model(rank.shape, layers=mine, first=place == 0, last=place == total - 1)
        model.to(getattr(torch, rank.precision.parameters))
        apply_tensor_parallel(model, rank, meshes)
        apply_context_parallel(model, rank.sequence, meshes)
        apply_expert_parallel(model, meshes)
        own = replace(policy, layers=tuple(policy.layers[layer] for layer in mine))
        handles.append(apply(model, own, layers="layers", allow_unmatched=total > 1))
        apply_fsdp(model, model.layers.values(), rank, meshes)
        model.to_empty(device=device)
        initialise(model, seed=0)
        models.append(model.train())
    try:
        yield models
    finally:
        for handle in handles:
            handle.remove()


def step_of(
    models: Sequence[Decoder], rank: TracedRank, pipeline: Pipeline, device: torch.device
) -> Callable[[], None]:
    """Forward and backward of all micro-batches."""
    mesh = make_meshes(rank.degrees, device).pipeline
    stage, total = mesh.get_local_rank(), pipeline.stages * pipeline.chunks
    size = (rank.samples * pipeline.micro_batches, rank.sequence // rank.degrees.context)
    # Ranks of a pipeline share a batch; those that share nothing but parameters have their own.
    of_stage = dist.get_rank() % (rank.degrees.world // pipeline.stages)
    seed = torch.Generator().manual_seed(of_stage // rank.degrees.tensor)
    tokens = torch.randint(rank.shape.vocab_size, size, generator=seed).to(device)
    if total == 1:

        def step() -> None:
            with _autocast(rank, device):
                loss = traced_loss(models[0], tokens)
            loss.backward()

        return step
    places = [position(pipeline, stage, chunk) for chunk in range(pipeline.chunks)]
    made = [
        PipelineStage(
            model,
            place,
            total,
            device,
            input_args=(_imagined(rank, None if place == 0 else rank.shape.hidden_size),),
            output_args=(_output(rank, model.head),),
            group=mesh.get_group(),
        )
        for model, place in zip(models, places, strict=True)
    ]
    kind: Any = _SCHEDULES[pipeline.schedule]  # type: ignore[index]
    single = issubclass(kind, PipelineScheduleSingle)
    given = made[0] if single else made
    head = next((model.head for model in models if model.head is not None), None)
    loss = partial(mean_loss, share=head.share if head is not None else None)
    more = {"labels": tokens} if head is not None and head.chunked else {}
    schedule = kind(given, n_microbatches=pipeline.micro_batches, loss_fn=loss, scale_grads=False)
    arguments = [tokens] if 0 in places else []

    def pipelined() -> None:
        with _autocast(rank, device):
            if total - 1 in places:
                schedule.step(*arguments, target=tokens, losses=[], return_outputs=False, **more)
            else:
                schedule.step(*arguments)

    return pipelined


def _output(rank: TracedRank, head: Head | None) -> Tensor:
    if head is None:
        return _imagined(rank, rank.shape.hidden_size)
    if head.chunked:
        return torch.empty((), device="meta", requires_grad=True)
    return _imagined(rank, rank.shape.vocab_size if head.share is None else head.share.size, logits=True)


def _imagined(rank: TracedRank, width: int | None, *, logits: bool = False) -> Tensor:
    """What goes into a stage or comes out of it, on meta: tokens without a width."""
    degrees = rank.degrees
    # FSDP computes all in one type, autocast only products.
    precision = rank.precision.compute if logits or degrees.sharded > 1 else rank.precision.parameters
    hidden = width is not None and not logits
    length = rank.sequence // (degrees.tensor if degrees.sequence_parallel and hidden else 1)
    sizes = (rank.samples, length) if width is None else (rank.samples, length, width)
    dtype = torch.int64 if width is None else getattr(torch, precision)
    return torch.empty(sizes, dtype=dtype, device="meta", requires_grad=width is not None)


def _autocast(rank: TracedRank, device: torch.device) -> torch.autocast:
    """As the runner has it, around a forward or a pipeline's step; FSDP has a mixed precision of its own."""
    precision = rank.precision
    wanted = precision.compute != precision.parameters and rank.degrees.sharded == 1
    return torch.autocast(device.type, getattr(torch, precision.compute), enabled=wanted)

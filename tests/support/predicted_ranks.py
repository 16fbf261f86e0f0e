"""Ranks that train the reference decoder: what each one's memory is predicted to be, and what it is on tide."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

import tide
from lowtide.cost.devices import find_device
from lowtide.cost.imagined import device_kernels
from lowtide.models.build import build_model
from lowtide.models.decoder import Decoder
from lowtide.models.initialise import initialise
from lowtide.planner.pipeline import even_pipeline
from lowtide.planner.simulate import simulate
from lowtide.policy import Policy
from lowtide.runtime.apply import Handle, apply
from lowtide.train.mesh import make_meshes
from lowtide.train.parallel import apply_expert_parallel, apply_fsdp, apply_tensor_parallel
from lowtide.train.traced import TracedRank, _groups, trace_rank

__all__ = ["measured_peaks", "predicted_peaks"]

MICRO_BATCHES = 4
"""Micro-batches of a pipeline's step; without stages there is one."""


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross-entropy of the labels."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def predicted_peaks(rank: TracedRank, policies: Sequence[Policy]) -> list[list[int]]:
    """For each Policy the peak of each pipeline stage, the batch that a caller gives included."""
    with device_kernels("other"):
        trace = trace_rank(replace(rank, loss=loss_of))
    count = _micro_batches(rank)
    pipeline = even_pipeline(len(trace.layers), stages=rank.degrees.pipeline, micro_batches=count)
    given = (rank.samples * rank.sequence * 8 * count + 511) // 512 * 512
    device = find_device("h100")
    return [[stage.peak + given for stage in simulate(trace, policy, device, pipeline).stages] for policy in policies]


def measured_peaks(rank: TracedRank, policies: Sequence[Policy]) -> list[int]:
    """This rank's peak in a warm step on tide, for each Policy."""
    tide.configure(races=False, poison=False)
    return [_measured(rank, policy) for policy in policies]


def _measured(rank: TracedRank, policy: Policy) -> int:
    device = torch.device("tide", 0)
    model, handle = _built(rank, policy, device)
    optimizer = torch.optim.AdamW(_groups(model), fused=True)
    step = _step_of(model, rank, device)
    gc.collect()  # an earlier model may still be there
    for _ in range(3):
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        step()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    handle.remove()
    return torch.accelerator.max_memory_allocated()


def _built(rank: TracedRank, policy: Policy, device: torch.device) -> tuple[Decoder, Handle]:
    """This rank's share of the model, as the runner builds it."""
    meshes = make_meshes(rank.degrees, device)
    stage, stages = meshes.pipeline.get_local_rank(), rank.degrees.pipeline
    mine = even_pipeline(rank.shape.num_layers, stages=stages).placement[stage][0]
    with torch.device("meta"):
        model = build_model(rank.shape, layers=mine, first=stage == 0, last=stage == stages - 1)
    model.to(getattr(torch, rank.precision.parameters))
    apply_tensor_parallel(model, rank, meshes)
    apply_expert_parallel(model, meshes)
    own = replace(policy, layers=tuple(policy.layers[layer] for layer in mine))
    handle = apply(model, own, layers="layers", allow_unmatched=stages > 1)
    apply_fsdp(model, model.layers.values(), rank, meshes)
    model.to_empty(device=device)
    initialise(model, seed=0)
    return model.train(), handle


def _step_of(model: Decoder, rank: TracedRank, device: torch.device) -> Callable[[], None]:
    """Forward and backward of all micro-batches."""
    stages, pipeline = rank.degrees.pipeline, make_meshes(rank.degrees, device).pipeline
    number = pipeline.get_local_rank()
    size = (rank.samples * _micro_batches(rank), rank.sequence)
    seed = torch.Generator().manual_seed(dist.get_rank() if stages == 1 else 0)
    tokens = torch.randint(rank.shape.vocab_size, size, generator=seed).to(device)
    if stages == 1:

        def step() -> None:
            with _autocast(rank, device):
                loss = loss_of(model(tokens), tokens)
            loss.backward()

        return step
    first, last = number == 0, number == stages - 1
    stage = PipelineStage(
        model,
        number,
        stages,
        device,
        input_args=(_imagined(rank, None if first else rank.shape.hidden_size),),
        output_args=(_imagined(rank, rank.shape.vocab_size if last else rank.shape.hidden_size, logits=last),),
        group=pipeline.get_group(),
    )
    schedule = Schedule1F1B(stage, n_microbatches=MICRO_BATCHES, loss_fn=loss_of, scale_grads=False)

    def pipelined() -> None:
        with _autocast(rank, device):
            if last:
                schedule.step(target=tokens, losses=[], return_outputs=False)
            else:
                schedule.step(*([tokens] if first else []))

    return pipelined


def _imagined(rank: TracedRank, width: int | None, *, logits: bool = False) -> Tensor:
    """What goes into a stage or comes out of it, on meta: tokens without a width."""
    precision = rank.precision.compute if logits else rank.precision.parameters
    sizes = (rank.samples, rank.sequence) if width is None else (rank.samples, rank.sequence, width)
    dtype = torch.int64 if width is None else getattr(torch, precision)
    return torch.empty(sizes, dtype=dtype, device="meta", requires_grad=width is not None)


def _micro_batches(rank: TracedRank) -> int:
    return MICRO_BATCHES if rank.degrees.pipeline > 1 else 1


def _autocast(rank: TracedRank, device: torch.device) -> torch.autocast:
    """As the runner has it, around a forward or a pipeline's step; FSDP has a mixed precision of its own."""
    precision = rank.precision
    wanted = precision.compute != precision.parameters and rank.degrees.shard == 1
    return torch.autocast(device.type, getattr(torch, precision.compute), enabled=wanted)

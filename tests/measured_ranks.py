"""Ranks that train the reference decoder on tide and are looked on: the Trace of each."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

import tide
from lowtide._torch_private import inner_tensor
from lowtide.adapt.measure import TIMED_STEPS, Measuring
from lowtide.policy import LayerPolicy, Policy
from lowtide.train.traced import TracedRank
from predicted_ranks import _autocast, _built, _step_of

__all__ = ["measured_trace"]


def measured_trace(rank: TracedRank) -> tuple[str, bool, float, int]:
    """This rank's Trace as JSON, whether looking on changed no bit, and the seconds and the peak of a plain step."""
    tide.configure(poison=False)
    plain, seconds, peak = _trained(rank, None)
    measurings: list[Measuring] = []
    watched, _, _ = _trained(rank, measurings)
    same = all(map(torch.equal, plain, watched))
    import json

    return json.dumps(measurings[0].trace().as_json()), same, seconds, peak


def _trained(rank: TracedRank, measurings: list[Measuring] | None) -> tuple[list[Tensor], float, int]:
    device = torch.device("tide", 0)
    layers = rank.shape.num_layers
    model, handle = _built(rank, Policy((LayerPolicy(),) * layers), device)
    handle.remove()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = _step_of(model, rank, device)
    stages = rank.degrees.pipeline
    measuring = Measuring(
        model, optimizers=[optimizer], layers="layers", last=dist.get_rank() == stages - 1 or stages == 1
    )
    gc.collect()
    seconds = 0.0
    for _ in range(TIMED_STEPS + 1):
        torch.accelerator.synchronize()
        dist.barrier()
        torch.accelerator.reset_peak_memory_stats()
        begin = tide.now()
        with measuring.step() if measurings is not None else nullcontext():
            with _autocast(rank, device):
                step()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        torch.accelerator.synchronize()
        seconds = (tide.now() - begin) / 1e9
    if measurings is not None:
        measurings.append(measuring)
    peak = torch.accelerator.max_memory_allocated()
    return [inner_tensor(parameter.detach()).cpu().clone() for parameter in model.parameters()], seconds, peak

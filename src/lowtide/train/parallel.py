"""Divide a model over ranks: tensor parallel, expert parallel, then FSDP2 or DDP."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lowtide.models.decoder import Decoder
from lowtide.train.mesh import Meshes
from lowtide.train.run import Run

__all__ = ["divide_experts", "divide_matrices", "share_data"]

_COLUMNS = (
    "attention.wq",
    "attention.wk",
    "attention.wv",
    "feed_forward.w1",
    "feed_forward.w3",
)
"""Matrices of a layer whose outputs are divided, where it has them."""
_ROWS = ("attention.wo", "feed_forward.w2")
"""Matrices of a layer whose inputs are divided."""
_NORMS = ("attention_norm", "ffn_norm")
_BLOCKS = ("attention", "feed_forward")


def divide_matrices(model: Decoder, run: Run, meshes: Meshes) -> None:
    """Tensor parallel, with sequence parallel between the matrices if the run asks for it."""
    if run.degrees.tensor == 1:
        return
    mesh, sequence = meshes.tensor, run.degrees.sequence_parallel
    between = Shard(1) if sequence else Replicate()
    ends: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    if sequence:
        ends["norm"] = SequenceParallel(use_local_output=True)
    parallelize_module(model, mesh, _present(model, ends))
    for layer in model.layers.values():
        plan: dict[str, Any] = dict.fromkeys(_COLUMNS, ColwiseParallel())
        plan.update(dict.fromkeys(_ROWS, RowwiseParallel(output_layouts=between)))
        if sequence:
            plan.update(dict.fromkeys(_NORMS, SequenceParallel(use_local_output=True)))
            plan.update((name, _gather(layer, name)) for name in _BLOCKS)
        parallelize_module(layer, mesh, _present(layer, plan))


def _gather(layer: nn.Module, name: str) -> Any:
    """Join the sequence again before a block; a block with experts also has to divide it again behind them."""
    return PrepareModuleInput(
        input_layouts=(Shard(1), None)[: 2 if name == "attention" else 1],
        desired_input_layouts=(Replicate(), None)[: 2 if name == "attention" else 1],
        use_local_output=True,
    )


def _present(module: nn.Module, plan: dict[str, Any]) -> dict[str, Any]:
    names = {name for name, _ in module.named_modules()}
    return {name: style for name, style in plan.items() if name in names}


def divide_experts(model: Decoder, run: Run, meshes: Meshes) -> None:
    """Expert parallel: each rank keeps its share of the experts of every layer."""
    if meshes.expert is None:
        return
    raise NotImplementedError


def share_data(model: nn.Module, layers: Iterable[nn.Module], run: Run, meshes: Meshes) -> None:
    """Share parameters over data-parallel ranks (FSDP2), layer by layer, if the run asks for it."""
    if run.degrees.shard == 1:
        return
    precision = MixedPrecisionPolicy()
    if run.precision.compute != run.precision.parameters:
        precision = MixedPrecisionPolicy(param_dtype=getattr(torch, run.precision.compute), reduce_dtype=torch.float32)
    settings: dict[str, Any] = {
        "mesh": meshes.sharded,
        "reshard_after_forward": run.reshard,
        "mp_policy": precision,
        "offload_policy": CPUOffloadPolicy() if run.offload else OffloadPolicy(),
    }
    for layer in layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)

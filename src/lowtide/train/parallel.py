"""Shard a model over ranks: tensor parallel, expert parallel, then FSDP2 or DDP."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lowtide.models.attention import Attention
from lowtide.models.context import ToHeads, ToTokens
from lowtide.models.decoder import Decoder
from lowtide.models.latent import LatentAttention
from lowtide.models.moe import Experts, MixtureOfExperts, distribute_experts
from lowtide.models.sharded_loss import share_of
from lowtide.train.mesh import Meshes
from lowtide.train.run import Division

__all__ = ["apply_context_parallel", "apply_expert_parallel", "apply_fsdp", "apply_tensor_parallel"]

_COLUMNS = (
    "attention.wq",
    "attention.wk",
    "attention.wv",
    "attention.linear_q_up_proj",
    "attention.linear_kv_up_proj",
    "feed_forward.w1",
    "feed_forward.w3",
    "feed_forward.shared_experts.w1",
    "feed_forward.shared_experts.w3",
)
"""Matrices of a layer whose outputs are sharded, where it has them."""
_ROWS = ("attention.wo", "attention.linear_proj", "feed_forward.w2", "feed_forward.shared_experts.w2")
"""Matrices of a layer whose inputs are sharded."""
_NORMS = ("attention_norm", "ffn_norm")


def apply_tensor_parallel(model: Decoder, run: Division, meshes: Meshes) -> None:
    """Tensor parallel, with sequence parallel between the matrices if the run asks for it."""
    if run.degrees.tensor == 1:
        return
    mesh, sequence = meshes.tensor, run.degrees.sequence_parallel
    between = Shard(1) if sequence else Replicate()
    scores = Shard(-1) if model.shape.head_loss == "sharded" else Replicate()
    ends: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=scores),
    }
    if model.head is not None and model.shape.head_loss == "sharded":
        model.head.share = share_of(model.shape.vocab_size, mesh)
    if sequence:
        ends["norm"] = SequenceParallel(use_local_output=True)
    parallelize_module(model, mesh, _present(model, ends))
    model.tie()  # both are sharded over the vocabulary
    for layer in model.all_layers:
        routed = isinstance(layer.feed_forward, MixtureOfExperts)
        plan: dict[str, Any] = dict.fromkeys(_COLUMNS, ColwiseParallel())
        plan.update(dict.fromkeys(_ROWS, RowwiseParallel(output_layouts=between)))
        # Routed experts answer with this rank's part of a sum, and so do shared ones: both are added up together.
        plan["feed_forward.shared_experts.w2"] = RowwiseParallel(output_layouts=Partial())
        # A norm over each head sees this rank's heads only: its gradient is a sum over ranks.
        plan.update(
            dict.fromkeys(
                ("attention.q_norm", "attention.k_norm"), SequenceParallel(sequence_dim=2, use_local_output=True)
            )
        )
        if sequence:
            plan.update(dict.fromkeys(_NORMS, SequenceParallel(use_local_output=True)))
            plan["attention"] = PrepareModuleInput(
                input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None), use_local_output=True
            )
            plan["feed_forward"] = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
            )
        parallelize_module(layer, mesh, _present(layer, plan))
        if routed:
            summed = PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=between)
            parallelize_module(layer, mesh, {"feed_forward": summed})
        if isinstance(layer.attention, LatentAttention):
            layer.attention.tensor_mesh = mesh


def _present(module: nn.Module, plan: dict[str, Any]) -> dict[str, Any]:
    names = {name for name, _ in module.named_modules()}
    return {name: style for name, style in plan.items() if name in names}


def apply_context_parallel(model: Decoder, tokens: int, meshes: Meshes) -> None:
    """Context parallel: each rank has its share of the ``tokens`` of every sample."""
    if meshes.context is None:
        return
    group = meshes.context.get_group()
    model.first_position = tokens // meshes.context.size() * meshes.context.get_local_rank()
    for layer in model.all_layers:
        assert isinstance(layer.attention, Attention | LatentAttention)
        layer.attention.to_heads, layer.attention.to_tokens = ToHeads(group), ToTokens(group)


def apply_expert_parallel(model: Decoder, meshes: Meshes) -> None:
    """Each rank keeps its share of the experts of every layer: some of them under expert parallel, a part of each under
    tensor parallel."""
    if meshes.experts is not None:
        distribute_experts(model, meshes.experts)


def apply_fsdp(
    model: nn.Module, layers: Iterable[nn.Module], run: Division, meshes: Meshes, apart: Sequence[nn.Module] = ()
) -> None:
    """Shard parameters over data-parallel ranks (FSDP2), layer by layer, if the run asks for it.

    What is outside the layers is gathered together, except that ``apart`` is gathered by itself.
    """
    if run.degrees.sharded == 1:
        return
    precision = MixedPrecisionPolicy()
    if run.precision.compute != run.precision.parameters:
        precision = MixedPrecisionPolicy(
            param_dtype=getattr(torch, run.precision.compute),
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,  # rotary tables stay as precise as they are
        )
    settings: dict[str, Any] = {
        "mesh": meshes.sharded,
        "reshard_after_forward": run.reshard,
        "mp_policy": precision,
    }
    for layer in layers:
        for module in layer.modules():
            if meshes.expert_sharded is not None and isinstance(module, Experts):
                _shard_experts(module, run, settings | {"mesh": meshes.expert_sharded})
        fully_shard(layer, **settings)
    if apart:
        fully_shard(list(apart), **settings)
    fully_shard(model, **settings)


def _shard_experts(experts: Experts, run: Division, settings: dict[str, Any]) -> None:
    """Shard experts that are expert-parallel only among the ranks that have the same ones."""
    ranks, held = run.degrees.shard // run.degrees.expert, experts.w1.weight.shape[0] // run.degrees.expert
    by_expert = held % ranks == 0  # otherwise each expert's matrices are sharded
    shared = fully_shard(experts, shard_placement_fn=None if by_expert else lambda parameter: Shard(1), **settings)
    # Tokens of all data-parallel ranks have come to these experts: their gradients are a sum over all of them.
    shared.set_gradient_divide_factor(float(run.degrees.data))
    if ranks > 1:  # not every backend can divide while it adds; torch 2.13 would divide twice on a single rank
        shared.set_force_sum_reduction_for_comms(True)

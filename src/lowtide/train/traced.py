"""The Trace of one rank of a run that is not started: any number of ranks, no device, no memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lowtide._torch_private.fake import FakeTensorMode
from lowtide._torch_private.modes import DisableTorchFunction
from lowtide._torch_private.training.meshes import imagined_process_group
from lowtide.errors import TraceError
from lowtide.models.build import build_model
from lowtide.models.decoder import Decoder
from lowtide.models.moe import Plan
from lowtide.models.shape import DecoderShape
from lowtide.models.sharded_loss import LEFT_OUT, VocabularyShare, summed_cross_entropy
from lowtide.trace.capture import capture
from lowtide.trace.layout import Layout
from lowtide.trace.optimizers import OptimizerName, make_optimizer
from lowtide.trace.trace import Trace
from lowtide.trace.waits import read_by_host
from lowtide.train.mesh import make_meshes
from lowtide.train.parallel import (
    apply_context_parallel,
    apply_expert_parallel,
    apply_fsdp,
    apply_tensor_parallel,
)
from lowtide.train.run import Degrees, Precision

__all__ = ["TracedRank", "balance_experts", "mean_loss", "trace_rank", "traced_loss"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedRank:
    """One rank of a run, as far as its Trace depends on it. Pipeline stages are the planner's: see ``Pipeline``."""

    shape: DecoderShape
    """The model."""
    degrees: Degrees = field(default_factory=Degrees)
    """How the work is sharded."""
    precision: Precision = field(default_factory=lambda: Precision(parameters="float32", compute="bfloat16"))
    """The types of numbers."""
    samples: int = 1
    """Samples of a micro-batch."""
    sequence: int = 4096
    """Tokens of a sample."""
    reshard: bool = True
    """Whether gathered parameters are freed after forward and gathered again in backward."""
    optimizer: OptimizerName = "adamw"
    """Whose states and step are traced."""
    expert_skew: float | tuple[float, ...] = 1.0
    """How many times an even share of the tokens this rank's experts get, where ranks share experts: in all layers, or
    in each."""
    compiled: bool = False
    """Whether its layers are compiled, each by itself."""


def trace_rank(rank: TracedRank, *, name: str = "", progress: Callable[[str], None] = lambda _: None) -> Trace:
    """The Trace of the first rank; of the layers that do the same, the first three and the last are run.

    ``trace = trace_rank(TracedRank(shape=find_shape("llama3-8b"), degrees=Degrees(shard=8)))``
    """
    if dist.is_initialized():
        raise TraceError("a run's ranks are imagined in a process group of their own: there is one already; leave it")
    degrees = replace(rank.degrees, pipeline=1)
    chosen, represented_by = _sample(rank.shape)
    with imagined_process_group(degrees.world), warnings.catch_warnings():
        # The head gives a view, which nothing here writes into.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        try:
            meshes = make_meshes(degrees, torch.device("cpu"))
            with torch.device("meta"):
                # The first stage and the last have a copy each of weights that are tied.
                tied = rank.shape.tie_word_embeddings and rank.degrees.pipeline == 1
                shape = replace(rank.shape, prediction_layers=0, tie_word_embeddings=tied)
                model = build_model(shape, layers=chosen)
            model.to(getattr(torch, rank.precision.parameters))
            division = replace(rank, degrees=degrees)
            apply_tensor_parallel(model, division, meshes)
            apply_context_parallel(model, rank.sequence, meshes)
            apply_expert_parallel(model, meshes)
            # The first stage has what comes before the layers, the last what comes after them.
            apart = [] if rank.degrees.pipeline == 1 else [one for one in (model.norm, model.head) if one is not None]
            apply_fsdp(model, model.layers.values(), division, meshes, apart)
            skews = rank.expert_skew
            for number, layer in zip(chosen, model.layers.values(), strict=True):
                balance_experts(layer, skews[number] if isinstance(skews, tuple) else skews)
            with FakeTensorMode(allow_non_fake_inputs=True):
                trace = _captured(model, rank, name, progress)
        finally:
            make_meshes.cache_clear()
    traced = dict(zip(chosen, trace.layers, strict=True))
    return replace(trace, layers=tuple(traced[layer] for layer in represented_by))


def _captured(model: Decoder, rank: TracedRank, name: str, progress: Callable[[str], None]) -> Trace:
    model.to_empty(device="cpu")
    model.tie()
    tokens = torch.zeros(rank.samples, rank.sequence // rank.degrees.context, dtype=torch.long)

    def run() -> Tensor:
        with _autocast(rank):
            return traced_loss(model, tokens)

    degrees = rank.degrees
    return capture(
        model,
        run,
        optimizer=make_optimizer(rank.optimizer, _groups(model)),
        name=name or "decoder",
        layout=Layout(
            replicate=degrees.replicate,
            shard=degrees.shard,
            tensor=degrees.tensor,
            context=degrees.context,
            expert=degrees.expert,
        ),
        batch={"samples": rank.samples, "tokens": rank.samples * rank.sequence},
        compiled=rank.compiled or None,
        progress=progress,
    )


def _groups(model: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
    """The parameters as the runner groups them: one kernel updates those that are sharded over the same ranks."""
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return [{"params": parameters} for parameters in groups.values()]


def _sample(shape: DecoderShape) -> tuple[Sequence[int], Sequence[int]]:
    """The layers that are traced, and for each layer of the model the one that represents it.

    The first layers and the last may do something else than those between, such as gathering parameters ahead.
    """
    runs: list[list[int]] = []
    for layer in range(shape.num_layers):
        if runs and shape.is_dense(runs[-1][0]) == shape.is_dense(layer):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    chosen: list[int] = []
    represented_by: list[int] = []
    for run in runs:
        ends = [*run[:3], *run[3:][-1:]]
        chosen += ends
        represented_by += [layer if layer in ends else run[2] for layer in run]
    return chosen, represented_by


def balance_experts(layer: nn.Module, skew: float = 1.0) -> None:
    """How a router will choose is not known: this rank's experts are taken to get ``skew`` times an even share."""

    def lengths(ours: Tensor, theirs: Tensor, slots: int) -> tuple[list[int], list[int]]:
        ranks = len(ours)
        shares = [slots // ranks + (rank < slots % ranks) for rank in range(ranks)]
        with DisableTorchFunction():  # a run reads both from the device, and these are no operators of a layer
            for counts in (ours, theirs):
                read_by_host(counts.sum(1))
        return shares, [round(share * skew) for share in shares]

    for module in layer.modules():
        if isinstance(module, Plan):
            module.lengths = lengths  # type: ignore[method-assign]


def _autocast(rank: TracedRank) -> AbstractContextManager[None]:
    """As the runner has it: FSDP has a mixed precision of its own."""
    if rank.precision.compute == rank.precision.parameters or rank.degrees.sharded > 1:
        return nullcontext()
    return torch.autocast("cpu", getattr(torch, rank.precision.compute))


def traced_loss(model: Decoder, tokens: Tensor) -> Tensor:
    """The mean loss of a micro-batch, as the runner computes it."""
    assert model.head is not None
    if model.head.chunked:
        return mean_loss(model(tokens, labels=tokens), tokens)
    return mean_loss(model(tokens), tokens, model.head.share)


def mean_loss(output: Tensor, labels: Tensor, share: VocabularyShare | None = None) -> Tensor:
    """The mean loss from logits, or from the sum of losses that a model gives."""
    total = summed_cross_entropy(output, labels, share) if output.dim() else output
    return total / (labels != LEFT_OUT).sum().clamp(min=1)

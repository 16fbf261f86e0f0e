"""One rank's share of a run, built: its parts of the model, sharded and with the Policy applied, and its optimizers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowtide.config.schema import Settings
from lowtide.errors import ConfigError
from lowtide.models.build import build_model
from lowtide.models.hugging_face import build_hugging_face, hugging_face_name
from lowtide.models.initialise import initialise
from lowtide.models.shape import DecoderShape, shape_of
from lowtide.models.sharded_loss import VocabularyShare
from lowtide.operators.layers import find_layers
from lowtide.policy import Policy
from lowtide.runtime.apply import Handle, apply
from lowtide.runtime.limits import Limits
from lowtide.train.degrees import heads_to_spread
from lowtide.train.mesh import Meshes
from lowtide.train.parallel import (
    apply_context_parallel,
    apply_expert_parallel,
    apply_fsdp,
    apply_tensor_parallel,
)
from lowtide.train.pipeline import Stage, stages_of
from lowtide.train.run import Run

__all__ = ["Job", "build_job", "refuse_context", "refuse_predictions", "refuse_tied", "stage_shapes"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One rank's share of a run."""

    stages: tuple[Stage, ...]
    """Its places in the pipeline; one without pipelining."""
    models: tuple[nn.Module, ...]
    """Its part of the model at each of them."""
    called: tuple[nn.Module, ...]
    """What a step calls: the parts, or DDP around them."""
    handles: tuple[tuple[Stage, Handle], ...]
    """The decisions at work, for each part that has layers; none where the adaptive mode makes them."""
    layers: str
    """Where in a part its layers are."""
    shape: DecoderShape | None
    """The model's shape; None for one of transformers."""
    vocabulary: int
    """Tokens the model knows."""
    names: Callable[[], Sequence[str]]
    """All parameters of the whole model, those of other stages included; building it again takes a while."""
    rename: Callable[[str], str]
    """What a parameter is called in a Hugging Face directory."""


def build_job(run: Run, settings: Settings, policy: Policy | None, meshes: Meshes, limits: Limits | None = None) -> Job:
    """Build this rank's share. Nothing is allocated before it is sharded."""
    if settings.top_level.pretrained_model_dir:
        return _build_hugging_face(run, settings, policy, meshes, limits)
    shape = shape_of(settings)
    stages = stages_of(run.placement, meshes.pipeline.get_local_rank())
    if run.placement.num_stages != run.degrees.pipeline:
        raise ConfigError(
            f"the layers are placed on {run.placement.num_stages} stages (stage_num) of {run.degrees.pipeline};"
            " the runner trains one model over all stages"
        )
    refuse_tied(shape, run)
    refuse_predictions(shape, run)
    refuse_context(shape, run)
    if shape.prediction_layers and run.adapt is not None and dist.get_rank() == 0:
        logger.warning("multi-token-prediction layers keep their activations: the adaptive mode decides those before")
    models, handles = [], []
    for stage in stages:
        with torch.device("meta"):
            model = build_model(shape, layers=stage.layers, first=stage.first, last=stage.last)
        model = model.to(getattr(torch, run.precision.parameters))
        apply_tensor_parallel(model, run, meshes)
        apply_context_parallel(model, run.sequence, meshes)
        apply_expert_parallel(model, meshes)
        _compile(model.all_layers, settings)
        if policy is not None and stage.layers:
            mine = replace(policy, layers=tuple(policy.layers[layer] for layer in stage.layers))
            handles.append((stage, apply(model, mine, layers="layers", limits=limits, allow_unmatched=stage.total > 1)))
        if policy is not None and model.predictions is not None:
            numbers = tuple(range(shape.num_layers, shape.num_layers + shape.prediction_layers))
            mine = replace(policy, layers=tuple(policy.layers[layer] for layer in numbers))
            # A pattern may match in the layers before only, such as one of a dense feed-forward block.
            handle = apply(model, mine, layers="predictions.layers", limits=limits, allow_unmatched=True)
            handles.append((stage._replace(layers=numbers), handle))
        models.append(model)
    for model in models:
        apply_fsdp(model, model.all_layers, run, meshes)
        model.to_empty(device=meshes.device)
        initialise(model, seed=run.seed)
    return Job(
        stages=stages,
        models=tuple(models),
        called=tuple(_copied(models, run, meshes)),
        handles=tuple(handles),
        layers="layers",
        shape=shape,
        vocabulary=shape.vocab_size,
        names=lambda: _names(shape),
        rename=hugging_face_name,
    )


def refuse_tied(shape: DecoderShape, run: Run) -> None:
    """ConfigError where the first and the last part of a model, with copies of one matrix, are parts of one rank."""
    if shape.embeds_twice and run.degrees.pipeline > 1 and run.placement.folded and run.placement.num_chunks > 1:
        asked, instead = "tie_word_embeddings is true", "false"
        if not shape.tie_word_embeddings:
            asked, instead = f"num_nextn_predict_layers is {shape.prediction_layers}", "0"
        raise ConfigError(
            f"{asked}, and in a folded pipeline (zero_bubble_v) the embedding and the head are two parts of one rank,"
            f" which would hold the embedding's weights twice; write {instead}, or use another schedule"
        )


def refuse_predictions(shape: DecoderShape, run: Run) -> None:
    """ConfigError where multi-token prediction does not go with how the run is sharded."""
    asked = f"num_nextn_predict_layers is {shape.prediction_layers}"
    if shape.prediction_layers and run.degrees.sequence_parallel:
        raise ConfigError(
            f"{asked}: multi-token-prediction layers look one token ahead, and with sequence parallel that token is on"
            " another rank; write 0, or use_seq_parallel: false, which tensor parallel works without"
        )


def refuse_context(shape: DecoderShape, run: Run) -> None:
    """ConfigError where a model does not go with context parallel as the run has it."""
    degrees = run.degrees
    if degrees.context == 1:
        return
    asked = f"context_parallel is {degrees.context}"
    heads = heads_to_spread(shape)
    if heads % (degrees.tensor * degrees.context):
        raise ConfigError(
            f"{asked}: its ranks get some of the heads each in attention, and {heads} heads of queries and keys cannot"
            f" be spread evenly over tensor {degrees.tensor} x context {degrees.context}"
        )
    parts = degrees.context * (degrees.tensor if degrees.sequence_parallel else 1)
    if run.sequence % parts:
        raise ConfigError(f"{asked}: samples of {run.sequence} tokens cannot be split into {parts} equal parts")
    experts = shape.experts
    if experts is not None and (experts.auxiliary or experts.capacity is not None):
        what = "moe_aux_loss_coeff" if experts.auxiliary else "a capacity of experts"
        raise ConfigError(
            f"{asked}: {what} is about all tokens of a sample, of which each rank has some; leave it out and balance"
            " experts by moe_router_enable_expert_bias, or write context_parallel: 1"
        )
    if shape.prediction_layers:
        raise ConfigError(
            f"{asked}: multi-token-prediction layers look one token ahead, which may be on another rank; write"
            " num_nextn_predict_layers: 0"
        )


def _build_hugging_face(
    run: Run, settings: Settings, policy: Policy | None, meshes: Meshes, limits: Limits | None
) -> Job:
    degrees = run.degrees
    if degrees.pipeline * degrees.tensor * degrees.expert * degrees.context > 1:
        raise ConfigError(
            f"models of transformers ({settings.top_level.pretrained_model_dir}) are trained with data parallel and"
            f" FSDP only; found tensor {degrees.tensor}, pipeline {degrees.pipeline}, expert {degrees.expert}, context"
            f" {degrees.context}"
        )
    model, deferred = build_hugging_face(settings.top_level.pretrained_model_dir, seed=run.seed)
    model = model.to(getattr(torch, run.precision.parameters)).train()
    if deferred is None:
        model = model.to(meshes.device)
    layers = find_layers(model)
    (stage,) = stages_of(run.placement, 0)
    _compile(layers.modules, settings)
    handles = [(stage, apply(model, policy, layers=layers.path, limits=limits))] if policy is not None else []
    apply_fsdp(model, layers.modules, run, meshes)
    if deferred is not None:
        deferred.fill(model, meshes.device)
    return Job(
        stages=(stage,),
        models=(model,),
        called=tuple(_copied([model], run, meshes)),
        handles=tuple(handles),
        layers=layers.path,
        shape=None,
        vocabulary=model.vocabulary,
        names=lambda: [name for name, _ in model.named_parameters()],
        rename=lambda name: name.removeprefix("model."),
    )


def _compile(layers: Iterable[nn.Module], settings: Settings) -> None:
    """Compile each layer, if the file asks for it: before a Policy is applied, so that it can swap; before FSDP."""
    if settings.top_level.compile:
        for layer in layers:
            layer.compile(backend=settings.top_level.compile_backend)


def _names(shape: DecoderShape) -> tuple[str, ...]:
    with torch.device("meta"):
        return tuple(name for name, _ in build_model(shape).named_parameters())


def _copied(models: Sequence[nn.Module], run: Run, meshes: Meshes) -> list[nn.Module]:
    """DDP around each part, where ranks have copies of the model."""
    if run.degrees.replicate == 1 or run.degrees.shard > 1:
        return list(models)
    group = meshes.data.get_group()  # the ranks of this stage; other stages have other parameters
    return [
        nn.parallel.DistributedDataParallel(model, process_group=group, forward_sync_buffers=False) for model in models
    ]


def stage_shapes(
    run: Run, shape: DecoderShape, stage: Stage, share: VocabularyShare | None = None
) -> tuple[Tensor, Tensor]:
    """What goes into a stage and comes out of it, as tensors on meta; the last gives logits of the ``share``."""
    parameters, logits = (getattr(torch, name) for name in (run.precision.parameters, run.precision.compute))
    stream = logits if run.degrees.sharded > 1 else parameters  # FSDP computes all in one type, autocast only products
    own = run.sequence // run.degrees.context
    length = own // (run.degrees.tensor if run.degrees.sequence_parallel else 1)
    vocabulary = share.size if share is not None else shape.vocab_size
    # torch sends a gradient back for what is said to need one
    hidden = torch.empty(run.batch_size, length, shape.hidden_size, dtype=stream, device="meta", requires_grad=True)
    tokens = torch.empty(run.batch_size, own, dtype=torch.int64, device="meta")
    scores = torch.empty(run.batch_size, own, vocabulary, dtype=logits, device="meta", requires_grad=True)
    if shape.head_loss == "chunked":
        scores = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
    return (tokens if stage.first else hidden), (scores if stage.last else hidden)

"""A run, resolved: what a training file of either layout asks for, on this many processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

from lowtide.adaptive.settings import AdaptSettings, ReadSettings, read_settings
from lowtide.config.check import Check
from lowtide.errors import ConfigError
from lowtide.trace.layout import Layout
from lowtide.train.transformers_model import refuse_contradictions
from lowtide.train.without_effect import refuse_ignored

if TYPE_CHECKING:
    from lowtide.config.placement import Placement
    from lowtide.config.schema import Settings

__all__ = ["Degrees", "Division", "Precision", "Run", "Update", "read_run"]

DataType = Literal["float32", "bfloat16", "float16"]
Schedule = Literal["1f1b", "gpipe", "interleaved", "zero_bubble_v"]
_TYPES: dict[str, DataType] = {
    **dict.fromkeys(("fp32", "float32"), "float32"),
    **dict.fromkeys(("fp16", "float16"), "float16"),
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Degrees(Layout):
    """How many ways the work of a run is shared."""

    sequence_parallel: bool = False
    """Whether tensor parallel also shards the sequence between the matrices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """The types of numbers."""

    parameters: DataType
    """The type of parameters and optimizer states."""
    compute: DataType
    """The type of matrix products."""


class Division(Protocol):
    """What of a run says how its model is sharded."""

    @property
    def degrees(self) -> Degrees:
        """How the work is sharded."""

    @property
    def precision(self) -> Precision:
        """The types of numbers."""

    @property
    def reshard(self) -> bool:
        """Whether gathered parameters are freed after forward and gathered again in backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What happens between the gradients and the parameters."""

    scaled: bool
    """Whether the loss is scaled, so that gradients may overflow and the step is then skipped."""
    max_norm: float | None
    """Gradients are scaled down to this norm of all together; None for no clipping."""
    skip_norm: float | None
    """From this norm on the step is skipped; None for never."""
    per_token_loss: bool
    """Whether the loss is the mean over all tokens of the step instead of over its micro-batches."""
    sum_gradients: bool
    """Whether gradients are summed over data parallel instead of averaged."""
    reduce_each: bool
    """Whether gradients are reduced after each micro-step, so that each rank holds its shard, instead of after the
    last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run, resolved."""

    degrees: Degrees
    """How the work is sharded."""
    placement: Placement
    """The pipeline stage of each layer."""
    schedule: Schedule
    """The order of micro-batches in the pipeline."""
    precision: Precision
    """The types of numbers."""
    update: Update
    """What happens between the gradients and the parameters."""
    batch_size: int
    """Samples of one data-parallel rank in one micro-step."""
    micro_steps: int
    """Micro-steps of one optimizer step: accumulated ones, or the micro-batches of the pipeline."""
    sequence: int
    """Tokens of a sample."""
    epochs: int | None
    """Passes over the data; None if the steps are given."""
    steps: int | None
    """Optimizer steps; None for ``epochs`` passes."""
    stop_step: int | None
    """The step after which the run ends early."""
    reshard: bool
    """Whether gathered parameters are freed after forward and gathered again in backward."""
    seed: int
    """The seed of weights, dropout and data."""
    deterministic: bool
    """Whether only deterministic kernels are used."""
    output_dir: str
    """Where everything the run writes goes."""
    adapt: AdaptSettings | None = None
    """How the run adapts itself to its memory; None where it does not."""
    notes: tuple[str, ...] = ()
    """What was decided for the file, in words, for the log."""
    warnings: tuple[str, ...] = ()
    """What was not as it should be, and what is used instead."""

    @property
    def samples_per_step(self) -> int:
        """Samples of one optimizer step, over all ranks."""
        return self.batch_size * self.micro_steps * self.degrees.data


def read_run(check: Check, world: int | None = None, device_memory: int | None = None) -> Run:
    """The run that a checked file asks for on ``world`` processes, or on as many as its degrees say.

    ``device_memory`` is that of one device in bytes, None where it is not known: the adaptive mode never fills more.
    """
    check.raise_errors()
    settings, form = check.settings, check.form
    if settings is None or form is None or form.placement is None:
        raise ConfigError(
            f"{check.document.name}: the file does not say how many layers the model has;"
            " write model.model_config.num_layers, or pretrained_model_dir"
        )
    refuse_contradictions(settings)
    refuse_ignored(settings)
    run = (_read_2026 if settings.layout == "2026" else _read_graph)(settings, form.placement, world)
    _refuse_compiled(settings, run.degrees)
    adapt, warnings = _adapt(settings, device_memory)
    return replace(run, adapt=adapt, warnings=tuple(f"adapt: {one}" for one in warnings))


def _refuse_compiled(settings: Settings, degrees: Degrees) -> None:
    """ConfigError where compiled layers do not work, or were not proved exact."""
    if not settings.top_level.compile:
        return
    unproved = "compiled layers were not compared there with eager ones"
    for degree, name, reason in (
        (degrees.tensor, "tensor-parallel ranks", "the backward of such compiled layers fails in torch 2.13"),
        (degrees.context, "context-parallel ranks", unproved),
        (degrees.pipeline, "pipeline stages", unproved),
        (degrees.expert, "expert-parallel ranks", unproved),
    ):
        if degree > 1:
            raise ConfigError(
                f"compile is true, with {degree} {name}: {reason}; write compile: false, or use data parallel and FSDP"
            )


def _adapt(settings: Settings, device_memory: int | None) -> ReadSettings:
    """How the run adapts itself. What it may use of the device bounds the plan too."""
    if "adapt" not in settings.present:
        return ReadSettings(None, ())
    adapt, most = settings.adapt, settings.context.max_device_memory
    read = read_settings(
        device_swap=adapt.device_swap,
        device_size=adapt.device_size,
        budget=adapt.budget,
        profiling_step=adapt.profiling_step,
        verbose=adapt.verbosity != "quiet",
        device_memory=min((size for size in (device_memory, most) if size is not None), default=None),
    )
    if read.settings is None:
        return read
    budget = most if read.settings.budget is None else read.settings.budget
    return read._replace(settings=replace(read.settings, budget=budget, watch=adapt.watch))


def _read_graph(settings: Settings, placement: Placement, world: int | None) -> Run:
    parallel, runner, wrapper = settings.parallel_config, settings.runner_config, settings.runner_wrapper
    notes: list[str] = []
    data = parallel.data_parallel
    others = parallel.model_parallel * parallel.pipeline_stage * parallel.context_parallel
    if "parallel_config" not in settings.present and world is not None:
        data = _share(world, others)
    shards = 1
    if settings.parallel.enable_parallel_optimizer:
        asked = settings.parallel.parallel_optimizer_config.optimizer_weight_shard_size
        shards = data if asked in (-1, 0) else min(asked, data)
        if data % shards:
            raise ConfigError(
                f"parallel_optimizer_config.optimizer_weight_shard_size is {shards} and does not divide the"
                f" {data} data-parallel ranks"
            )
    degrees = _degrees(
        data,
        shards,
        parallel.pipeline_stage,
        parallel.model_parallel,
        parallel.expert_parallel,
        parallel.context_parallel,
        parallel.use_seq_parallel and parallel.model_parallel > 1,
        notes,
    )
    _check_world(degrees, world, "parallel_config")
    if parallel.context_parallel_algo != "ulysses_cp":
        _note_exchange(degrees, f"context_parallel_algo {parallel.context_parallel_algo}", notes)
    if settings.optimizer.swap:
        notes.append("optimizer.swap has no effect: optimizer states stay on the device; share them with FSDP instead")
    schedule = settings.parallel.pipeline_config.pipeline_scheduler
    stop = [runner.stop_step, *(getattr(callback, "stop_step", None) for callback in settings.callbacks)]
    pipelined = degrees.pipeline > 1
    enlarged = settings.top_level.micro_batch_interleave_num
    return Run(
        degrees=degrees,
        placement=placement,
        schedule=_schedule(schedule, placement),
        precision=_precision(settings, notes),
        update=Update(
            scaled=wrapper.scale_sense is not None,
            max_norm=wrapper.max_grad_norm if wrapper.use_clip_grad else None,
            skip_norm=wrapper.global_norm_spike_threshold if wrapper.use_skip_data_by_global_norm else None,
            per_token_loss=wrapper.calculate_per_token_loss,
            sum_gradients=not settings.parallel.gradients_mean,
            reduce_each=settings.parallel.parallel_optimizer_config.gradient_accumulation_shard,
        ),
        batch_size=runner.batch_size * enlarged,
        micro_steps=(parallel.micro_batch_num or degrees.pipeline) if pipelined else runner.gradient_accumulation_steps,
        sequence=_sequence(settings),
        epochs=runner.epochs or 1,
        steps=None,
        stop_step=min((step for step in stop if step), default=None),
        # The reference keeps gathered weights unless they are to be gathered again in backward.
        reshard=bool(settings.recompute_config.parallel_optimizer_comm_recompute),
        seed=settings.top_level.seed,
        deterministic=settings.context.deterministic in (True, "ON") or settings.top_level.train_precision_sync is True,
        output_dir=settings.top_level.output_dir,
        notes=tuple(notes),
    )


def _read_2026(settings: Settings, placement: Placement, world: int | None) -> Run:
    parallel, training = settings.parallelism, settings.training
    notes: list[str] = []
    others = parallel.tensor_parallel * parallel.pipeline_parallel * parallel.context_parallel
    others *= parallel.data_parallel_replicate
    shards = parallel.data_parallel_shard or _share(world or others, others)
    degrees = _degrees(
        shards * parallel.data_parallel_replicate,
        shards,
        parallel.pipeline_parallel,
        parallel.tensor_parallel,
        parallel.expert_parallel,
        parallel.context_parallel,
        parallel.tensor_parallel > 1,
        notes,
    )
    _check_world(degrees, world, "parallelism")
    if parallel.context_parallel_method is not None:
        _note_exchange(degrees, f"context_parallel_method {parallel.context_parallel_method}", notes)
    if parallel.cpu_offload:
        notes.append("cpu_offload has no effect: parameters and optimizer states stay on the device")
    local = training.local_batch_size
    micro_steps, left = divmod(training.global_batch_size or local * degrees.data, local * degrees.data)
    if left or not micro_steps:
        raise ConfigError(
            f"training.global_batch_size is {training.global_batch_size}; expected a multiple of local_batch_size"
            f" {local} x {degrees.data} data-parallel ranks, such as {local * degrees.data}"
        )
    if micro_steps < degrees.pipeline:
        notes.append(f"{degrees.pipeline} micro-batches instead of {micro_steps}: one for each pipeline stage at least")
        micro_steps = degrees.pipeline
    policy = parallel.reshard_after_forward_policy
    return Run(
        degrees=degrees,
        placement=placement,
        schedule=_schedule("1f1b", placement),
        precision=_precision(settings, notes),
        update=Update(
            scaled=False,
            max_norm=training.max_norm,
            skip_norm=None,
            per_token_loss=False,
            sum_gradients=False,
            reduce_each=False,
        ),
        batch_size=local,
        micro_steps=micro_steps,
        sequence=_sequence(settings),
        epochs=None if training.steps else 1,
        steps=training.steps,
        stop_step=None,
        reshard=policy in (True, "always") or (policy == "default" and degrees.pipeline == 1),
        seed=training.seed,
        deterministic=training.deterministic,
        output_dir=settings.top_level.output_dir,
        notes=tuple(notes),
    )


def _degrees(
    data: int,
    shards: int,
    pipeline: int,
    tensor: int,
    expert: int,
    context: int,
    sequence_parallel: bool,
    notes: list[str],
) -> Degrees:
    if expert > 1 and context > 1:
        raise ConfigError(
            f"expert_parallel is {expert} and context_parallel {context}: experts are not spread over ranks that share"
            " samples; write 1 for one of them"
        )
    if expert > 1 and data % expert:
        raise ConfigError(f"expert_parallel is {expert} and does not divide the {data} data-parallel ranks")
    if data > 1 and (tensor > 1 or expert > 1 or context > 1) and shards % (expert if expert > 1 else data):
        # DDP holds no parameters that are sharded already; HSDP together with tensor parallel is not proved.
        notes.append(
            f"parameters are shared by all {data} data-parallel ranks (FSDP): copies of them do not go with"
            f" {'tensor' if tensor > 1 else 'expert' if expert > 1 else 'context'} parallel"
        )
        shards = data
    return Degrees(
        replicate=data // shards,
        shard=shards,
        pipeline=pipeline,
        tensor=tensor,
        context=context,
        expert=expert,
        sequence_parallel=sequence_parallel,
    )


def _note_exchange(degrees: Degrees, asked: str, notes: list[str]) -> None:
    if degrees.context > 1:
        notes.append(
            f"{asked}: the runner exchanges heads for tokens, as ulysses_cp does; the results are the same up to the"
            " order of a sum"
        )


def _share(world: int, others: int) -> int:
    if world % others:
        raise ConfigError(f"{world} processes are no multiple of the other degrees, whose product is {others}")
    return world // others


def _check_world(degrees: Degrees, world: int | None, section: str) -> None:
    if world is None or world == degrees.world:
        return
    raise ConfigError(
        f"{section} asks for {degrees.world} processes (data {degrees.data} x tensor {degrees.tensor} x context"
        f" {degrees.context} x pipeline {degrees.pipeline}) and {world} were started; start {degrees.world} (--nproc"
        f" {degrees.world} on one machine), or change the degrees"
    )


def _schedule(name: str, placement: Placement) -> Schedule:
    if name == "zero_bubble_v":
        return "zero_bubble_v"
    if placement.num_chunks > 1:
        return "interleaved"
    return "gpipe" if name == "gpipe" else "1f1b"


def _precision(settings: Settings, notes: list[str]) -> Precision:
    parameters = _type(settings.model.params_dtype) or "float32"
    compute = _type(settings.model.compute_dtype)
    if compute is None:
        compute = parameters
        notes.append(f"compute_dtype is not given: matrix products are {compute}, the type of the parameters")
    if compute == "float16" and settings.runner_wrapper.scale_sense is None:
        notes.append("float16 without runner_wrapper.scale_sense: gradients may underflow")
    return Precision(parameters=parameters, compute=compute)


def _type(name: str | None) -> DataType | None:
    return _TYPES[name] if name is not None else None


def _sequence(settings: Settings) -> int:
    found = settings.model.seq_length or settings.train_dataset.data_loader.config.seq_length
    if found is None:
        raise ConfigError("the file does not say how long a sample is; write model.model_config.seq_length: 4096")
    return found

"""What a command plans for: a training file, a model, or a Trace, with the layout it is to run in."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from lowtide.errors import LowtideError, ModelError, PlanError

if TYPE_CHECKING:
    from torch import Tensor

    from lowtide.models.shape import DecoderShape
    from lowtide.operators.load import LoadedModel
    from lowtide.planner.pipeline import Pipeline, ScheduleName
    from lowtide.policy import Policy
    from lowtide.trace.optimizers import OptimizerName
    from lowtide.trace.trace import Trace
    from lowtide.train.run import DataType, Degrees, Precision

__all__ = ["LayoutOptions", "Traced", "Training", "prepare", "trace_of"]

SEQUENCE = 4096
"""Tokens of a sample unless given."""
Progress: TypeAlias = Callable[[str], None]


class LayoutOptions(NamedTuple):
    """The options that say how a model is sharded; None where the command line does not say."""

    data: int | None = None
    """Data-parallel ranks; they share parameters (FSDP) unless ``replicate``."""
    tensor: int | None = None
    pipeline: int | None = None
    chunks: int | None = None
    """Virtual stages of each pipeline stage."""
    expert: int | None = None
    context: int | None = None
    micro_batches: int | None = None
    sequence: int | None = None
    samples: int | None = None
    """Samples of a micro-batch."""
    schedule: ScheduleName | None = None
    replicate: bool = False
    """Whether each data-parallel rank has the whole model."""
    sequence_parallel: bool = True
    """Whether tensor parallel also shards the sequence between the matrices."""
    expert_skew: float = 1.0
    """How many times an even share of the tokens the experts of the fullest rank get."""


class Training(NamedTuple):
    """The options that say how a model is trained; None where the command line does not say."""

    dtype: DataType | None = None
    """What parameters are stored in."""
    autocast: DataType | None = None
    """What matrix products are computed in; the same as ``dtype`` for no autocast."""
    optimizer: OptimizerName | None = None
    lora: int | None = None
    """The rank of adapters on the matrices of layers, which alone are trained."""
    layers: str | None = None
    """The module that holds the layers."""
    compiled: bool = False
    """Whether the layers are compiled, each by itself."""


class Traced(NamedTuple):
    """What there is to plan."""

    trace: Trace
    pipeline: Pipeline
    policy: Policy | None
    """What the file asks for itself; None if it is no training file."""


def prepare(source: str, layout: LayoutOptions, training: Training) -> Callable[[Progress], Traced]:
    """Read what ``source`` names, and return what traces it.

    That is a Trace's file, a training file, a built-in shape, a directory of transformers with a ``config.json``, or
    ``module:function``. What is wrong with the source, the layout or the options is raised here, before torch is
    imported. When it is traced, no weights are loaded and no memory is taken.
    """
    path = Path(source)
    if path.suffix == ".json":
        return _trace_file(path, layout, training)
    if path.suffix in (".yaml", ".yml"):
        return _training_file(source, layout, training)
    if ":" in source or path.is_dir():
        return _model(source, layout, training)
    return _shape(source, layout, training)


def trace_of(source: str, layout: LayoutOptions, progress: Progress = lambda _: None) -> Traced:
    """Trace what ``source`` names, trained as :class:`Training` has it where nothing is said."""
    return prepare(source, layout, Training())(progress)


def _trace_file(path: Path, layout: LayoutOptions, training: Training) -> Callable[[Progress], Traced]:
    from lowtide.trace.trace import Trace

    if not path.is_file():
        raise ModelError(f"there is no file {path}")
    trace = Trace.load(path)
    known = trace.layout
    samples, tokens = trace.batch.get("samples"), trace.batch.get("tokens")
    rows: tuple[tuple[str, object, object], ...] = (
        ("--dp", layout.data, known and known.data),
        ("--tp", layout.tensor, known and known.tensor),
        ("--cp", layout.context, known and known.context),
        ("--ep", layout.expert, known and known.expert),
        ("--micro-batch-size", layout.samples, samples),
        ("--seq", layout.sequence, tokens // samples if samples and tokens else None),
        ("--dtype", training.dtype, trace.dtype),
        ("--autocast", training.autocast, None),
        ("--optimizer", training.optimizer, trace.optimizer_name.lower()),
        ("--lora", training.lora, None),
        ("--layers", training.layers, None),
        ("--compile", training.compiled or None, None),
    )
    for option, asked, found in rows:
        if asked is not None and asked != found:
            was = f"was traced with {option} {found}" if found else f"is traced already, and cannot take {option}"
            given = option if asked is True else f"{option} {asked}"
            raise PlanError(f"{path} {was}; found {given}: leave it out, or trace the model again")
    return lambda _: _traced(trace, _pipeline(len(trace.layers), layout, trace.pipeline))


def _shape(source: str, layout: LayoutOptions, training: Training) -> Callable[[Progress], Traced]:
    from lowtide.models.known import find_shape
    from lowtide.train.run import Degrees

    _refuse_for_own(source, training)
    shape = find_shape(source)
    data, tensor = layout.data or 1, layout.tensor or 1
    degrees = Degrees(
        replicate=data if layout.replicate else 1,
        shard=1 if layout.replicate else data,
        tensor=tensor,
        context=layout.context or 1,
        expert=layout.expert or 1,
        pipeline=layout.pipeline or 1,
        sequence_parallel=layout.sequence_parallel and tensor > 1,
    )
    pipeline = _pipeline(shape.num_layers, layout, None)
    samples, sequence = layout.samples or 1, layout.sequence or SEQUENCE
    # In a pipeline parameters that were gathered stay, as in the runner unless a file says something else.
    trace = _rank(
        source,
        shape,
        degrees,
        samples,
        sequence,
        training,
        reshard=pipeline.stages == 1,
        expert_skew=layout.expert_skew,
    )
    return lambda progress: _traced(trace(progress), pipeline)


def _refuse_for_own(source: str, training: Training) -> None:
    for option, given in (("--lora", training.lora), ("--layers", training.layers)):
        if given is not None:
            raise PlanError(f"{option} is for models of transformers and functions; {source} is one of lowtide's own")


def _rank(
    name: str,
    shape: DecoderShape,
    degrees: Degrees,
    samples: int,
    sequence: int,
    training: Training,
    precision: Precision | None = None,
    reshard: bool = True,
    expert_skew: float = 1.0,
    compiled: bool = False,
) -> Callable[[Progress], Trace]:
    """Check one of lowtide's own models, and return what traces a rank of it."""
    from dataclasses import replace

    from lowtide.train.degrees import check_degrees
    from lowtide.train.run import Precision

    check_degrees(name, shape, degrees, sequence)
    if expert_skew != 1 and degrees.expert == 1:
        raise PlanError(f"--expert-skew {expert_skew:g}: no ranks share experts; give --ep too, or leave it out")
    notes: tuple[str, ...] = ()
    if sequence > shape.max_position_embeddings:
        notes = (
            f"{name} has positions for {shape.max_position_embeddings} tokens; it is planned as if it had them for"
            f" {sequence}",
        )
        shape = replace(shape, max_position_embeddings=sequence)
    precision = precision or Precision(parameters="float32", compute="bfloat16")
    parameters = training.dtype or precision.parameters
    half = parameters if training.dtype in ("bfloat16", "float16") else precision.compute
    precision = Precision(parameters=parameters, compute=training.autocast or half)

    def trace(progress: Progress) -> Trace:
        from lowtide.train.traced import TracedRank, trace_rank

        rank = TracedRank(
            shape=shape,
            degrees=degrees,
            precision=precision,
            samples=samples,
            sequence=sequence,
            reshard=reshard,
            expert_skew=expert_skew,
            optimizer=training.optimizer or "adamw",
            compiled=compiled or training.compiled,
        )
        traced = trace_rank(rank, name=name, progress=progress)
        return replace(traced, notes=(*notes, *traced.notes))

    return trace


def _training_file(source: str, layout: LayoutOptions, training: Training) -> Callable[[Progress], Traced]:
    from dataclasses import replace

    from lowtide.config.check import check_file
    from lowtide.models.shape import shape_of
    from lowtide.operators.names import layer_operators
    from lowtide.train.run import read_run

    _refuse_for_own(source, training)
    check = check_file(source, layer_operators)
    run = read_run(check)
    assert check.settings is not None
    if check.settings.top_level.pretrained_model_dir:
        raise ModelError(f"{source} trains a model of transformers: plan for its directory, with the layout as options")
    shape = shape_of(check.settings)
    degrees = run.degrees
    if layout.data is not None:
        shared = degrees.shard > 1 and not layout.replicate
        degrees = replace(degrees, shard=layout.data if shared else 1, replicate=1 if shared else layout.data)
    degrees = replace(
        degrees,
        tensor=layout.tensor or degrees.tensor,
        context=layout.context or degrees.context,
        expert=layout.expert or degrees.expert,
    )
    given = None
    if layout.pipeline or layout.chunks:
        stages, chunks = layout.pipeline or run.placement.num_stages, layout.chunks or run.placement.num_chunks
        counts = layout._replace(pipeline=stages, chunks=chunks, micro_batches=layout.micro_batches or run.micro_steps)
        given = _pipeline(shape.num_layers, counts, None)
    samples, sequence = layout.samples or run.batch_size, layout.sequence or run.sequence
    trace = _rank(
        Path(source).stem,
        shape,
        degrees,
        samples,
        sequence,
        training,
        run.precision,
        run.reshard,
        layout.expert_skew,
        check.settings.top_level.compile,
    )

    def traced(progress: Progress) -> Traced:
        from lowtide.train.pipeline import planned_pipeline

        own = planned_pipeline(run)
        own = replace(
            own,
            micro_batches=layout.micro_batches or own.micro_batches,
            schedule=layout.schedule or own.schedule,
        )
        return _traced(trace(progress), given or own, check.policy)

    return traced


def _model(source: str, layout: LayoutOptions, training: Training) -> Callable[[Progress], Traced]:
    if any((one or 1) > 1 for one in (layout.data, layout.tensor, layout.context, layout.expert)):
        raise ModelError(
            f"{source} is planned for one rank: lowtide knows how to shard its own models, such as llama3-8b,"
            " and training files'; leave --dp, --tp, --cp and --ep out, or trace the sharded model and give its Trace"
        )
    _check_model(source)
    if training.lora is not None and importlib.util.find_spec("peft") is None:
        raise ModelError("--lora adds adapters with peft, which is not installed: pip install peft")

    def traced(progress: Progress) -> Traced:
        trace = _trace_model(source, layout, training, progress)
        return _traced(trace, _pipeline(len(trace.layers), layout, None))

    return traced


def _check_model(source: str) -> None:
    """What can be said of a model that is named without importing it."""
    if Path(source).is_dir():
        if not (Path(source) / "config.json").is_file():
            raise ModelError(f"{source} has no config.json: give a directory of a model of transformers")
        if importlib.util.find_spec("transformers") is None:
            raise ModelError(
                "reading a Hugging Face configuration needs transformers: pip install lowtide[transformers]"
            )
        return
    name = source.rpartition(":")[0]
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise ModelError(f"there is no file {name}")
        return
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` has it
    package = name.partition(".")[0]
    if not package.isidentifier() or importlib.util.find_spec(package) is None:
        raise ModelError(
            f"{source}: there is no module {package!r}, neither installed nor in the working directory; expected"
            " module:function or file.py:function"
        )


def _trace_model(source: str, layout: LayoutOptions, training: Training, progress: Progress) -> Trace:
    import torch

    from lowtide._torch_private.fake import FakeTensorMode, converting_fake_parameters
    from lowtide.operators.adapters import add_lora
    from lowtide.operators.load import does_not_run, load_model, one_sequence_each
    from lowtide.trace.capture import capture
    from lowtide.trace.layout import Layout
    from lowtide.trace.optimizers import make_optimizer

    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # the error below says it
    samples, sequence = layout.samples or 1, layout.sequence or SEQUENCE
    dtype = getattr(torch, training.dtype) if training.dtype is not None else None
    computed = getattr(torch, training.autocast) if training.autocast is not None else None
    with FakeTensorMode(allow_non_fake_inputs=True), one_sequence_each():
        with converting_fake_parameters():
            loaded = load_model(source, batch=samples, sequence=sequence, dtype=dtype)
            if training.lora is not None:
                loaded = loaded._replace(model=add_lora(loaded.model, training.lora, training.layers))
        assumed = list(loaded.notes)

        def run() -> Any:
            with torch.autocast("cpu", computed, enabled=computed is not None and computed != dtype):
                return loaded.run() if loaded.run is not None else _objective(loaded, assumed)

        trained = [parameter for parameter in loaded.model.parameters() if parameter.requires_grad]
        progress("tracing")
        try:
            return capture(
                loaded.model,
                run,
                optimizer=make_optimizer(training.optimizer or "adamw", trained),
                layers=training.layers,
                name=Path(source).name,
                layout=Layout(),
                notes=assumed,
                compiled=training.compiled or None,
                progress=progress,
            )
        except LowtideError:
            raise
        except Exception as error:
            raise does_not_run(source, error) from error


def _objective(loaded: LoadedModel, assumed: list[str]) -> Tensor:
    """The loss that the model computes; else the cross-entropy of its logits; else, and it is said, a sum."""
    from torch import Tensor
    from torch.nn import functional

    output = loaded.model(*loaded.args, **loaded.kwargs)
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    first = next((one for one in loaded.args if isinstance(one, Tensor)), None)
    logits = getattr(output, "logits", output)
    logits = logits[0] if isinstance(logits, (tuple, list)) else logits
    if not isinstance(logits, Tensor):
        raise ModelError(
            f"the model returned a {type(output).__name__}, which has no loss: return the model with a function that"
            " does one forward and returns the loss"
        )
    if logits.dim() == 0:
        return logits
    tokens = first is not None and not first.is_floating_point() and logits.shape[:-1] == first.shape
    note = (
        "the loss is taken to be the cross-entropy of the logits in float32"
        if tokens
        else "the loss is taken to be the sum of the model's output: return the model with a function that does one"
        " forward and returns the loss to have your own counted"
    )
    if note not in assumed:
        assumed.append(note)
    if tokens and first is not None:
        return functional.cross_entropy(logits.flatten(0, -2).float(), first.flatten())
    return logits.float().sum()


def _pipeline(layers: int, layout: LayoutOptions, known: Pipeline | None) -> Pipeline:
    """The stages that are asked for, or else those that a Trace remembers; checked."""
    from dataclasses import replace

    from lowtide.planner.pipeline import even_pipeline
    from lowtide.planner.schedule import actions

    if known is not None and not layout.pipeline and not layout.chunks:
        pipeline = replace(
            known,
            micro_batches=layout.micro_batches or known.micro_batches,
            schedule=layout.schedule or known.schedule,
        )
    else:
        stages, chunks, count = layout.pipeline, layout.chunks, layout.micro_batches
        if known is not None:
            stages, count = stages or known.stages, count or known.micro_batches
        pipeline = even_pipeline(layers, stages or 1, chunks or 1, count or 1, layout.schedule)
    actions(pipeline)  # an impossible schedule is an error
    return pipeline


def _traced(trace: Trace, pipeline: Pipeline, policy: Policy | None = None) -> Traced:
    """The Trace remembers the stages that it is planned for."""
    from dataclasses import replace

    from lowtide.planner.pipeline import even_pipeline

    plain = pipeline == even_pipeline(len(trace.layers))
    return Traced(replace(trace, pipeline=None if plain else pipeline), pipeline, policy)

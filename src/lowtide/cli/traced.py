"""What a command plans for: a training file, a model, or a Trace, with the layout it is to run in."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lowtide.errors import LowtideError, ModelError

if TYPE_CHECKING:
    from lowtide.planner.pipeline import Pipeline, ScheduleName
    from lowtide.policy import Policy
    from lowtide.trace.trace import Trace

__all__ = ["Layout", "Traced", "trace_of"]


class Layout(NamedTuple):
    """The options that say how a model is sharded; None where the command line does not say."""

    data: int | None = None
    """Data-parallel ranks; they share parameters (FSDP) unless ``replicate``."""
    tensor: int | None = None
    pipeline: int | None = None
    chunks: int | None = None
    """Virtual stages of each pipeline stage."""
    expert: int | None = None
    micro_batches: int | None = None
    sequence: int | None = None
    samples: int | None = None
    """Samples of a micro-batch."""
    schedule: ScheduleName | None = None
    replicate: bool = False
    """Whether each data-parallel rank has the whole model."""
    sequence_parallel: bool = True
    """Whether tensor parallel also shards the sequence between the matrices."""


class Traced(NamedTuple):
    """What there is to plan."""

    trace: Trace
    pipeline: Pipeline
    policy: Policy | None
    """What the file asks for itself; None if it is no training file."""


def trace_of(source: str, layout: Layout, progress: Callable[[str], None] = lambda _: None) -> Traced:
    """Trace what ``source`` names: a Trace's file, a training file, a built-in shape, a directory of transformers with
    a ``config.json``, or ``module:function``. No weights are loaded, no memory is taken."""
    from lowtide.planner.pipeline import even_pipeline

    path = Path(source)
    policy: Policy | None = None
    if path.suffix == ".json" and path.is_file():
        from lowtide.trace.trace import Trace

        trace = Trace.load(path)
    elif path.suffix in (".yaml", ".yml"):
        return _from_file(source, layout, progress)
    elif ":" in source or path.is_dir():
        trace = _from_model(source, layout, progress)
    else:
        trace = _from_shape(source, layout, progress)
    pipeline = even_pipeline(
        len(trace.layers), layout.pipeline or 1, layout.chunks or 1, layout.micro_batches or 1, layout.schedule
    )
    return Traced(trace, pipeline, policy)


def _from_shape(source: str, layout: Layout, progress: Callable[[str], None]) -> Trace:
    from lowtide.models.known import find_shape
    from lowtide.train.run import Degrees
    from lowtide.train.traced import TracedRank, trace_rank

    shape = find_shape(source)
    data = layout.data or 1
    degrees = Degrees(
        replicate=data if layout.replicate else 1,
        shard=1 if layout.replicate else data,
        tensor=layout.tensor or 1,
        expert=layout.expert or 1,
        sequence_parallel=layout.sequence_parallel and (layout.tensor or 1) > 1,
    )
    rank = TracedRank(shape=shape, degrees=degrees, samples=layout.samples or 1, sequence=layout.sequence or 4096)
    return trace_rank(rank, name=source, progress=progress)


def _from_file(source: str, layout: Layout, progress: Callable[[str], None]) -> Traced:
    from dataclasses import replace

    from lowtide.config.check import check_file
    from lowtide.models.shape import shape_of
    from lowtide.operators.names import layer_operators
    from lowtide.planner.pipeline import even_pipeline
    from lowtide.train.pipeline import planned_pipeline
    from lowtide.train.run import read_run
    from lowtide.train.traced import TracedRank, trace_rank

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
    degrees = replace(degrees, tensor=layout.tensor or degrees.tensor, expert=layout.expert or degrees.expert)
    trace = trace_rank(
        TracedRank(
            shape=shape,
            degrees=degrees,
            precision=run.precision,
            samples=layout.samples or run.batch_size,
            sequence=layout.sequence or run.sequence,
            reshard=run.reshard,
        ),
        name=Path(source).stem,
        progress=progress,
    )
    micro_batches = layout.micro_batches or run.micro_steps
    if layout.pipeline or layout.chunks:
        stages, chunks = layout.pipeline or run.placement.num_stages, layout.chunks or run.placement.num_chunks
        return Traced(
            trace, even_pipeline(shape.num_layers, stages, chunks, micro_batches, layout.schedule), check.policy
        )
    pipeline = planned_pipeline(run)
    schedule = layout.schedule or pipeline.schedule
    return Traced(trace, replace(pipeline, micro_batches=micro_batches, schedule=schedule), check.policy)


def _from_model(source: str, layout: Layout, progress: Callable[[str], None]) -> Trace:
    import torch

    from lowtide._torch_private.fake import FakeTensorMode
    from lowtide.operators.load import does_not_run, load_model, one_sequence_each
    from lowtide.trace.capture import capture

    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # the error below says it
    if (layout.tensor or 1) > 1 or (layout.expert or 1) > 1 or (layout.data or 1) > 1:
        raise ModelError(
            f"{source} is planned for one rank: lowtide knows how to shard its own models, such as llama3-8b,"
            " and training files'; leave --dp, --tp and --ep out, or trace the sharded model and give its Trace"
        )
    samples, sequence = layout.samples or 1, layout.sequence or 4096
    with FakeTensorMode(allow_non_fake_inputs=True), one_sequence_each():
        loaded = load_model(source, batch=samples, sequence=sequence)

        def run() -> torch.Tensor:
            output = loaded.model(*loaded.args, **loaded.kwargs)
            loss: torch.Tensor = getattr(output, "loss", output)
            return loss if loss.dim() == 0 else loss.float().sum()

        progress("tracing")
        try:
            return capture(
                loaded.model,
                run,
                optimizer=torch.optim.AdamW(loaded.model.parameters(), fused=True),
                name=Path(source).name,
                batch={"samples": samples, "tokens": samples * sequence},
                progress=progress,
            )
        except LowtideError:
            raise
        except Exception as error:
            raise does_not_run(source, error) from error

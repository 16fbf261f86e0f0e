"""The loss over an evaluation data set, every so many steps; training goes on as if it had not been.

[Note: what an evaluation leaves behind]
Nothing: it runs without gradients, in eval mode, where decided layers run as they are and routers count nothing. The
modes of all modules and the random generators are restored, and FSDP's parameters are sharded again. Pipeline stages
are run one after the other, over a process group of its own: an aborted training step may have left messages in the
other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from lowtide.config.schema import Settings
from lowtide.config.schema.callbacks import EvalCallBack
from lowtide.errors import ConfigError
from lowtide.train import generators
from lowtide.train.data.batches import Batch, Batches
from lowtide.train.data.packing import Packing, packing_of
from lowtide.train.data.sample import LEFT_OUT
from lowtide.train.data.source import source_of
from lowtide.train.job import Job, stage_shapes
from lowtide.train.mesh import Meshes
from lowtide.train.objective import Objective
from lowtide.train.pipeline import stages_of
from lowtide.train.run import Run
from lowtide.train.step import given_to_model

__all__ = ["Evaluation", "Intervals", "evaluation_of", "intervals_of"]

logger = logging.getLogger(__name__)


class Intervals(NamedTuple):
    """When an evaluation is due."""

    steps: int
    """Every so many steps; below 1 for never."""
    epochs: int
    """Every so many epochs; below 1 for never."""

    def due(self, step: int, steps_in_epoch: int) -> bool:
        """Whether one follows this step, from 1.

        >>> [step for step in range(1, 9) if Intervals(3, 2).due(step, steps_in_epoch=4)]
        [3, 6, 8]
        """
        each = (self.steps, self.epochs * steps_in_epoch)
        return any(every > 0 and step % every == 0 for every in each)


def intervals_of(settings: Settings) -> Intervals:
    """What the file says; the callback's intervals over those outside of it."""
    for callback in settings.callbacks:
        if isinstance(callback, EvalCallBack):
            return Intervals(callback.step_interval, callback.epoch_interval)
    return Intervals(settings.top_level.eval_step_interval, settings.top_level.eval_epoch_interval)


def evaluation_of(
    settings: Settings,
    run: Run,
    meshes: Meshes,
    job: Job,
    cache: Path,
    autocast: Callable[[], AbstractContextManager[None]],
    place: Callable[[str], None],
) -> Evaluation | None:
    """The evaluation that a file asks for; None where it does not. ConfigError where its data cannot be used."""
    if not settings.top_level.do_eval:
        return None
    loader = settings.eval_dataset.data_loader
    split = [float(one) for one in (loader.config.split or "1").replace("/", ",").split(",")]
    if len(split) > 1 and split[1] > 0:
        raise ConfigError(
            f"eval_dataset: split is {loader.config.split!r}, and an evaluation does not read the second share of its"
            " files; give it files of its own, and leave split out"
        )
    sizes = loader.sizes or []
    samples = next((one for one in (sizes[1:2] or [0]) if one), sizes[0] if sizes else 0)
    given = settings.eval_dataset.model_copy(
        update={"data_loader": loader.model_copy(update={"sizes": [samples]}), "repeat": 1}
    )
    evaluated = settings.with_section("train_dataset", given)  # so that it is read as training data is
    source = source_of(evaluated, seq_length=run.sequence, vocab_size=job.vocabulary, cache=cache)
    each = run.batch_size * run.degrees.data
    if len(source) < each:
        raise ConfigError(
            f"eval_dataset has {len(source)} samples, and all data-parallel ranks together evaluate {each} at a time"
            f" (batch_size {run.batch_size} on {run.degrees.data} ranks); use more data, or smaller batches"
        )
    if rest := len(source) % each:
        logger.info("an evaluation leaves out the last %d of %d samples: all ranks take %d", rest, len(source), each)
    batches = Batches(
        source,
        batch_size=run.batch_size,
        data_rank=meshes.samples_from,
        data_ranks=run.degrees.data,
        samples_per_step=each,
        seed=run.seed,
        shuffle=False,
    )
    return Evaluation(run, meshes, job, batches, packing_of(evaluated, run), intervals_of(settings), autocast, place)


class Evaluation:
    """Evaluates on one rank; see [Note: what an evaluation leaves behind]."""

    def __init__(
        self,
        run: Run,
        meshes: Meshes,
        job: Job,
        batches: Batches,
        packing: Packing | None,
        intervals: Intervals,
        autocast: Callable[[], AbstractContextManager[None]],
        place: Callable[[str], None],
    ) -> None:
        self.meshes, self.job, self.batches, self.packing = meshes, job, batches, packing
        self.intervals, self.autocast, self.place = intervals, autocast, place
        # The plain mean of one micro-batch, whatever a training step is made of.
        update = replace(run.update, per_token_loss=False, sum_gradients=False)
        alone = replace(run, update=update, micro_steps=1)
        self.objective = Objective(alone, meshes.data.get_group(), job.models, meshes.tokens_from)
        self.stages = _Stages(run, meshes, job) if run.degrees.pipeline > 1 else None

    def __call__(self, step: int) -> float:
        """The mean loss over all tokens of the data, the same on every rank."""
        begin = time.perf_counter()
        totals: list[Tensor] = []
        tokens = 0
        with _undisturbed(self.job.models), torch.no_grad():
            for number in range(self.batches.steps_per_epoch):
                self.place("evaluation")
                (batch,) = self.batches.for_step(number * self.batches.samples_per_step)
                loss = self._loss(batch)
                if loss is not None:
                    count = int((batch.labels != LEFT_OUT).sum())
                    totals.append(loss.float() * count)
                    tokens += count
        self.batches.close()
        # Ranks that share a layer's matrices count the same tokens, in both sums.
        mine = torch.stack(totals).cpu().double().sum() if totals else torch.zeros((), dtype=torch.float64)
        both = torch.stack((mine, torch.tensor(float(tokens), dtype=torch.float64)))
        dist.all_reduce(both)
        total, counted = both.tolist()
        mean = float(total / max(counted, 1.0))
        samples = self.batches.steps_per_epoch * self.batches.samples_per_step
        seconds = time.perf_counter() - begin
        logger.info("evaluation after step %d: loss: %.6f over %d samples, %.1f s", step, mean, samples, seconds)
        return mean

    def _loss(self, batch: Batch) -> Tensor | None:
        """The mean loss of one micro-batch, on ranks with the head."""
        tokens = batch.tokens.to(self.meshes.device)
        labels = batch.labels.to(self.meshes.device)
        with self.autocast():
            own, more = given_to_model(self.objective, self.packing, tokens, labels)
            if self.stages is not None:
                output = self.stages.run(own, more)
            else:
                (model,) = self.job.models
                output = model(own, **more)
            return self.objective(output, labels) if output is not None else None


class _Stages:
    """Forward through all pipeline stages, in the order of their numbers on every rank."""

    def __init__(self, run: Run, meshes: Meshes, job: Job) -> None:
        self.meshes, self.job = meshes, job
        shape = job.shape
        assert shape is not None  # of lowtide's own models: no others have pipeline stages
        self.given = [stage_shapes(run, shape, stage)[0] for stage in job.stages]
        self.rank_of = {
            stage.number: rank for rank in range(run.degrees.pipeline) for stage in stages_of(run.placement, rank)
        }
        ranks = dist.get_process_group_ranks(meshes.pipeline.get_group())
        group = dist.new_group(ranks, use_local_synchronization=True)
        assert isinstance(group, ProcessGroup)  # this rank is a member
        self.group = group

    def run(self, tokens: Tensor, more: Mapping[str, Tensor]) -> Tensor | None:
        """What the last stage gives, on its rank; it gets ``more`` with its input."""
        me = self.meshes.pipeline.get_local_rank()
        value: Tensor | None = None
        sent: list[Any] = []
        for stage, model, given in zip(self.job.stages, self.job.models, self.given, strict=True):
            if stage.first:
                value = tokens
            elif (before := self.rank_of[stage.number - 1]) != me:
                value = torch.empty_like(given, device=self.meshes.device, requires_grad=False)
                dist.recv(value, group=self.group, group_src=before)
            value = model(value, **(more if stage.last else {}))
            if not stage.last and (after := self.rank_of[stage.number + 1]) != me:
                assert value is not None
                sent.append((dist.isend(value.contiguous(), group=self.group, group_dst=after), value))
        for work, _ in sent:
            work.wait()
        return value if any(stage.last for stage in self.job.stages) else None


@contextmanager
def _undisturbed(models: Sequence[nn.Module]) -> Iterator[None]:
    """Eval mode inside; afterwards everything is as before."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    random = generators.capture()
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        generators.restore(random)
        for module, _ in modes:
            if isinstance(module, FSDPModule):
                module.reshard()
        if torch.accelerator.is_available():
            torch.accelerator.reset_peak_memory_stats()

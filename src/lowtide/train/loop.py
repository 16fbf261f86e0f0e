"""The steps of a run, one after the other: data, step, monitors, checkpoint."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from lowtide.adaptive.settings import profiling_warnings
from lowtide.config.schema import Settings
from lowtide.config.schema.callbacks import MFLossMonitor, MoEDropRateCallback
from lowtide.planner.workload import Workload
from lowtide.policy import Policy
from lowtide.runtime.apply import Handle
from lowtide.runtime.limits import Limits
from lowtide.runtime.receipt import Receipt
from lowtide.train.checkpoint import Checkpoints
from lowtide.train.data.batches import Batch, batches_of
from lowtide.train.data.packing import packing_of
from lowtide.train.data.source import source_of
from lowtide.train.drop_rate import meaning
from lowtide.train.evaluation import evaluation_of
from lowtide.train.expert_load import ExpertLoad
from lowtide.train.job import Job, stage_shapes
from lowtide.train.logs import OF_EACH_RANK
from lowtide.train.loss_scale import scale_of
from lowtide.train.memory_statistics import memory_statistics, wants_memory_statistics
from lowtide.train.mesh import Meshes, rank_seed
from lowtide.train.monitors import Curve, DropRate, JsonLines, LossLine, Profile, ProgressBar, TensorBoard, WandB
from lowtide.train.objective import Objective
from lowtide.train.optimizer import make_optimizers
from lowtide.train.options import TrainOptions
from lowtide.train.pipeline import Pipeline, Stage, make_pipeline
from lowtide.train.record import Monitor, StepRecord
from lowtide.train.run import Run
from lowtide.train.run_directory import RunDirectory
from lowtide.train.state import TrainState
from lowtide.train.step import Outcome, Step
from lowtide.train.stop import StopRequest
from lowtide.train.tied import TiedWeights
from lowtide.train.watchdog import Watchdog
from lowtide.train.weights import load_weights

if TYPE_CHECKING:
    from rich.console import Console

    from lowtide.adaptive.session import Adaptive

__all__ = ["Issued", "Loop"]

logger = logging.getLogger(__name__)

RECEIPT_EVERY = 100
"""Steps between two receipts. The second step has one too: in the first, some layers are still being profiled."""

CHECKPOINT_SECONDS = 1800.0
"""How long a checkpoint may take before the watchdog takes it for a hang, where the watchdog is quicker otherwise."""


class Issued(NamedTuple):
    """A step that was issued, and may still be running on the device."""

    step: int
    outcome: Callable[[], Outcome]
    """Waits for what it came to."""
    rate: float
    begin: float
    """When the host began it, in seconds of no epoch."""
    samples: int
    """Samples consumed up to its end."""
    peak_bytes: int | None


class Loop:
    """The steps of a run on one rank."""

    def __init__(
        self,
        run: Run,
        settings: Settings,
        meshes: Meshes,
        job: Job,
        directory: RunDirectory,
        checkpoints: Checkpoints,
        save_every: int,
        options: TrainOptions,
        fixed: Policy | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.run, self.settings, self.meshes, self.job = run, settings, meshes, job
        self.options = options
        self.directory, self.checkpoints, self.save_every = directory, checkpoints, save_every
        self.receipts: list[Receipt] = []
        cache = directory.path / "cache"
        source = source_of(settings, seq_length=run.sequence, vocab_size=job.vocabulary, cache=cache)
        self.data = batches_of(
            settings,
            source,
            batch_size=run.batch_size,
            data_rank=meshes.samples_from,
            data_ranks=run.degrees.data,
            samples_per_step=run.samples_per_step,
            seed=run.seed,
        )
        self.steps = run.steps or (run.epochs or 1) * self.data.steps_per_epoch
        self.last = min(self.steps, run.stop_step or self.steps)
        self.optimizers, self.rates = make_optimizers(
            settings, job.models, job.names, steps=self.steps, steps_in_epoch=self.data.steps_per_epoch
        )
        self.number = 0
        """The step this rank is in."""
        self.workload: Workload | None = None
        """What a step computes, and the device's peak; None where MFU is not known."""
        self.stop: StopRequest | None = None
        """What asks the run to save and end early; None where nothing does."""
        self.stopping = False
        """Whether any rank was asked to, known to all from the same step on."""
        self._finished = 0.0
        """When the last step was finished."""
        self.ahead = 0 if meshes.device.type == "cpu" or settings.top_level.profile else 1
        """Steps that may be issued and not read: see [Note: a step is read when the next is issued]."""
        self.watchdog = _watchdog(options, directory)
        objective = Objective(run, meshes.data.get_group(), job.models, meshes.tokens_from)
        self.step = Step(
            run,
            meshes,
            job.called,
            self.optimizers,
            scale_of(settings.runner_wrapper.scale_sense),
            objective,
            self._experts(),
            self._pipeline(objective),
            self._at,
            packing_of(settings, run),
            lambda: self.stop is not None and self.stop.signal_name is not None,
            self._tied(),
        )
        self.state = TrainState(
            parts=job.models,
            optimizers=self.optimizers,
            progress={"step": 0, **self.data.state(0)},
            seed=rank_seed(run, meshes),
            layout=str(run.degrees),
        )
        self.adaptive = self._adaptive(fixed, limits)
        self.evaluation = evaluation_of(settings, run, meshes, job, cache, self.step.autocast, self._at)

    def _adaptive(self, fixed: Policy | None, limits: Limits | None) -> Adaptive | None:
        """The session that decides while the run trains; ``fixed`` is what the file decides."""
        if self.run.adapt is None:
            return None
        if self.run.adapt.profiling_steps is not None and dist.get_rank() == 0:
            for text in profiling_warnings(self.run.adapt.profiling_steps, self.last):
                logger.warning("adapt: %s", text)
        from lowtide.train.adaptive import make_adaptive

        return make_adaptive(self.run, self.job, self.meshes, self.optimizers, fixed, self.directory, limits)

    def _experts(self) -> ExpertLoad:
        shape = self.job.shape
        experts = shape.experts.count if shape is not None and shape.experts is not None else 0
        layers = self.run.placement.num_layers + self.settings.model.num_nextn_predict_layers
        load = ExpertLoad(
            self.job.models, self.meshes.data.get_group(), self.meshes.device, layers=layers, experts=experts
        )
        for callback in self.settings.callbacks:
            if isinstance(callback, MoEDropRateCallback) and callback.capacity_factor is not None:
                load.capacity = callback.capacity_factor
                dropping = shape.experts.capacity if shape is not None and shape.experts is not None else None
                logger.info("%s", meaning(callback.capacity_factor, dropping))
        return load

    def _tied(self) -> TiedWeights | None:
        shape = self.job.shape
        if shape is None or not shape.embeds_twice or self.run.degrees.pipeline == 1:
            return None
        return TiedWeights(self.job.models, self.meshes.pipeline.get_group())

    def _pipeline(self, objective: Objective) -> Pipeline | None:
        if self.run.degrees.pipeline == 1:
            return None
        shape, share = self.job.shape, objective.head.share if objective.head is not None else None
        assert shape is not None
        return make_pipeline(
            self.run,
            self.job.called,
            self.job.stages,
            self.meshes.pipeline.get_group(),
            self.meshes.device,
            lambda stage: stage_shapes(self.run, shape, stage, share),
            objective,
        )

    def train(self, console: Console | None) -> dict[str, Any]:
        """Train to the last step; what became of the run, for ``--json``."""
        begun = self.resume()
        record: StepRecord | None = None
        stopped = False
        with ExitStack() as stack:
            stack.callback(self.data.close)
            if self.adaptive is not None:
                stack.callback(self.adaptive.remove)
            if self.watchdog is not None:
                stack.callback(self.watchdog.close)
            monitors = self.monitors(begun, console)
            for monitor in monitors:
                stack.callback(monitor.close)
            unread: list[Issued] = []
            for step in range(begun + 1, self.last + 1):
                unread.append(self.issue(step))
                due = bool(self.save_every) and (step % self.save_every == 0 or step == self.last)
                at_once = due or step == self.last or self._evaluates(step)
                # All ranks read the same steps here, so all know of a request to stop at the same step.
                while unread and (at_once or self.stopping or len(unread) > self.ahead):
                    record = self._evaluated(self.finish(unread.pop(0)))
                    for monitor in monitors:
                        monitor.step(record)
                self._write_receipts(step)
                self.checkpoints.poll()
                stopped = self.stopping and step < self.last
                if stopped or due:
                    self._at("checkpoint", patience=CHECKPOINT_SECONDS)
                    saved = self.checkpoints.save(step, self.state)
                if stopped:
                    self.checkpoints.wait()
                    self._say_stopped(step, saved)
                    break
        if wants_memory_statistics():
            for line in memory_statistics(self.receipts):
                logger.info("%s", line, extra=OF_EACH_RANK)
        return {
            "run_directory": str(self.directory.path),
            "steps": self.last,
            "stopped_after": self.number if stopped else None,
            "resumed_from": begun or None,
            "loss": record.loss if record is not None else None,
        }

    def _say_stopped(self, step: int, saved: Path) -> None:
        asked = self.stop.signal_name if self.stop is not None else None
        if asked is None and dist.get_rank() != 0:
            return
        logger.warning(
            "stopped after step %d of %d by %s: saved %s; the same command continues from there",
            *(step, self.last, asked or "a signal to another rank", saved),
        )

    def resume(self) -> int:
        """Load the checkpoint the run continues from; the step it was saved after, 0 for the beginning."""
        if self.directory.checkpoint is None:
            self._load_weights()
            return 0
        if self.options.resume in (None, "auto"):
            self.checkpoints.resume(self.state)  # the newest that is not damaged
        else:
            self.checkpoints.load(self.state, self.directory.checkpoint)
        progress = self.state.progress
        self.step.scale = self.step.scale.loaded(progress["loss_scale"])
        progress.update(self.data.state(self.data.restored(progress)))
        return int(progress["step"])

    def _load_weights(self) -> None:
        top = self.settings.top_level
        path = top.load_checkpoint or (self.settings.checkpoint.load_path if self.settings.layout == "2026" else "")
        if path:
            load_weights(self.job.models, Path(path), rename=self.job.rename)

    def one(self, step: int) -> StepRecord:
        """One step, from its data to its record."""
        return self._evaluated(self.finish(self.issue(step)))

    def issue(self, step: int) -> Issued:
        """Train one step; on a device, it may still be running when this returns."""
        begin, self.number = time.perf_counter(), step
        consumed = int(self.state.progress["samples"])
        self._at("data")
        batches = self.data.for_step(consumed)
        rate = self.rates.set(step - 1)
        outcome = self.step(batches) if self.adaptive is None else self._adapted(self.adaptive, batches)
        consumed += self.run.samples_per_step
        self.state.progress.update(step=step, loss_scale=self.step.scale.state_dict(), **self.data.state(consumed))
        return Issued(step, outcome, rate, begin, consumed, _peak_bytes())

    def finish(self, issued: Issued) -> StepRecord:
        """Wait for the end of a step; its record."""
        outcome = issued.outcome()
        self.stopping = self.stopping or outcome.stop
        before, self._finished = self._finished, time.perf_counter()
        return self._record(issued, outcome, self._finished - max(before, issued.begin))

    def _evaluates(self, step: int) -> bool:
        return self.evaluation is not None and self.evaluation.intervals.due(step, self.data.steps_per_epoch)

    def _evaluated(self, record: StepRecord) -> StepRecord:
        """The record of the step that was issued last, with the evaluation that follows it."""
        if self.evaluation is None or not self._evaluates(record.step):
            return record
        return replace(record, evaluation_loss=self.evaluation(record.step))

    def _adapted(self, adaptive: Adaptive, batches: Sequence[Batch]) -> Callable[[], Outcome]:
        """The step, which may be run more than once: see [Note: a step that is retried]."""
        outcome = adaptive.step(lambda: self.step(batches))
        assert outcome is not None
        return outcome

    def _at(self, phase: str, micro: int = 0, patience: float = 0.0) -> None:
        """Note where this rank is, for when the job hangs."""
        if self.watchdog is not None:
            self.watchdog.at(phase, self.number, micro, patience)

    def _record(self, issued: Issued, outcome: Outcome, seconds: float) -> StepRecord:
        in_epoch, step = self.data.steps_per_epoch, issued.step
        return StepRecord(
            step=step,
            steps=self.last,
            epoch=(step - 1) // in_epoch + 1,
            epochs=-(-self.steps // in_epoch),
            step_in_epoch=(step - 1) % in_epoch + 1,
            steps_in_epoch=in_epoch,
            loss=outcome.loss,
            losses=outcome.losses,
            drop_rates=outcome.drop_rates,
            seconds=seconds,
            learning_rate=issued.rate,
            overflow=outcome.overflow,
            loss_scale=outcome.loss_scale,
            global_norm=outcome.global_norm,
            skipped=outcome.skipped,
            tokens=self.run.samples_per_step * self.run.sequence,
            samples=issued.samples,
            peak_bytes=issued.peak_bytes,
            mfu=self.workload.mfu(seconds) if self.workload is not None else None,
        )

    def monitors(self, begun: int, console: Console | None) -> list[Monitor]:
        """What looks at each step: rank 0 alone, but for profiles. A step's record is the same on all ranks."""
        top, found = self.settings.top_level, list[Monitor]()
        if top.profile and self.meshes.leads:
            file = self.directory.path / "profile" / f"rank_{dist.get_rank()}.json"
            first = 1 if top.init_start_profile else top.profile_start_step
            found.append(Profile(file, begun=begun, first=first, last=top.profile_stop_step, memory=top.profile_memory))
        if dist.get_rank() == 0:
            every = next((one.per_print_times for one in self.settings.callbacks if isinstance(one, MFLossMonitor)), 1)
            found.append(
                LossLine(
                    every=every,
                    separate=top.print_separate_loss,
                    samples_per_step=self.run.samples_per_step,
                    ranks=self.run.degrees.world,
                )
            )
            if any(isinstance(one, MoEDropRateCallback) for one in self.settings.callbacks):
                found.append(DropRate())
            found += [JsonLines(self.directory.metrics, after=begun), Curve(), ProgressBar(console)]
            if "tensorboard" in self.options.track:
                found.append(TensorBoard(self.directory.path / "tensorboard", after=begun))
            if "wandb" in self.options.track:
                found.append(WandB(self.directory.path, identity=self.directory.path.resolve().name))
        return found

    def _write_receipts(self, step: int) -> None:
        """What lowtide did, from the rank that speaks for a pipeline stage."""
        if not self.meshes.leads or not (step == 2 or step % RECEIPT_EVERY == 0 or step == self.last):
            return
        for stage, handle in self._handles():
            receipt = handle.receipt()
            if wants_memory_statistics():
                self.receipts.append(receipt)
            line = {"step": step, "layers": list(stage.layers), **receipt.as_json()}
            with self.directory.receipts(dist.get_rank()).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def _handles(self) -> Sequence[tuple[Stage, Handle]]:
        """The decisions at work; none in a step in which the adaptive mode measures."""
        if self.adaptive is None:
            return self.job.handles
        handles = self.adaptive.handles
        return list(zip(self.job.stages, handles, strict=True)) if handles else []


def _watchdog(options: TrainOptions, directory: RunDirectory) -> Watchdog | None:
    """None unless hangs are to be reported; a rank's file is small and is written only then."""
    if options.watchdog == 0:
        return None
    return Watchdog(
        directory.path / "watchdog",
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        timeout=options.watchdog_seconds,
        end=options.redirect,  # the launcher restarts the ranks
    )


def _peak_bytes() -> int | None:
    """The device allocator's peak since the last step."""
    if not torch.accelerator.is_available():
        return None
    peak = torch.accelerator.max_memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    return peak

"""The job that ``crash.py`` kills: ``lowtide train`` on two ranks, watched from inside.

The ranks are forked from a process that has imported everything, because importing torch takes longer than the whole
job. From there on they do what the command does: the file is read, the run directory opened, the newest checkpoint
found, the run continued. Each rank writes what it did, one JSON object a line, for the process that killed it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch imports it at the first save, which takes seconds: once in the parent is enough
from torch.distributed.tensor import DTensor

from lowtide.train.commit import checkpoints_in
from lowtide.train.loop import Issued, Loop
from lowtide.train.main import train
from lowtide.train.options import TrainOptions
from lowtide.train.record import StepRecord
from lowtide.train.state import TrainState
from lowtide.train.stop import StopRequest, stop_signals

RANKS, EVERY, KEEP = 2, 4, 3
STEPS_IN_EPOCH, SAMPLES_IN_STEP = 12, 8
CONFIG = f"""
seed: 7
output_dir: ./output
use_legacy: true
model:
  model_config:
    vocab_size: 64
    hidden_size: 16
    num_layers: 2
    num_attention_heads: 2
    intermediate_size: 32
    seq_length: 16
    hidden_dropout: 0.1
    params_dtype: float32
    compute_dtype: float32
parallel:
  enable_parallel_optimizer: true
parallel_config:
  data_parallel: {RANKS}
runner_config:
  epochs: 1
  batch_size: {SAMPLES_IN_STEP // RANKS}
runner_wrapper:
  use_clip_grad: true
  max_grad_norm: 1.0
optimizer:
  type: AdamW
lr_schedule:
  type: CosineWithWarmUpLR
  learning_rate: 1.0e-2
  warmup_steps: 4
train_dataset:
  data_loader:
    type: SyntheticDataLoader
    sizes: [{STEPS_IN_EPOCH * SAMPLES_IN_STEP + 3}, 0, 0]
  shuffle: true
callbacks:
  - type: CheckpointMonitor
    save_checkpoint_steps: {EVERY}
    keep_checkpoint_max: {KEEP}
"""


@dataclass(frozen=True, slots=True)
class Job:
    """One start of the job."""

    directory: Path
    """Where its ranks leave their lines."""
    run: Path
    """The run directory."""
    asynchronous: bool
    """Whether it saves while it trains on."""
    epochs: int
    """After how many epochs the run is finished."""

    @property
    def checkpoints(self) -> Path:
        """Where its checkpoints are."""
        return self.run / "checkpoints"

    @property
    def metrics(self) -> Path:
        """The runner's own line for each step."""
        return self.run / "metrics.jsonl"


class Watched:
    """Says what each step of a rank was, with the samples in it, and which checkpoints are committed."""

    def __init__(self, loop: Loop, say: Callable[..., None], *, digests: bool) -> None:
        self.loop, self.say, self.digests = loop, say, digests
        self.resumed: int | None = None
        self.samples: list[int] = []
        self.under_way: list[int] = []
        self.issue, self.finish = loop.issue, loop.finish
        self.for_step, self.save = loop.data.for_step, loop.checkpoints.save
        watched: Any = loop
        watched.issue, watched.finish = self._issue, self._finish
        watched.data.for_step, watched.checkpoints.save = self._for_step, self._save

    def done(self, stopped_after: int | None) -> None:
        """The run is finished, or stopped after a step because it was asked to."""
        self._say_resumed(self.loop.state.progress["step"])
        if stopped_after is None:
            self.say(done=digest_of(self.loop.state))
        else:
            self.say(committed=stopped_after, stopped=True)

    def _issue(self, step: int) -> Issued:
        self._say_resumed(step - 1)
        if self.loop.checkpoints.poll() and self.under_way:
            self.say(committed=self.under_way.pop())
        return self.issue(step)

    def _finish(self, issued: Issued) -> StepRecord:
        """On the CPU a step is finished before the next is issued."""
        record = self.finish(issued)
        if self.digests:  # after each step: a run that is asked to stop saves any of them
            self.say(state=record.step, digest=digest_of(self.loop.state))
        values = {"loss": record.loss, "global_norm": record.global_norm, "learning_rate": record.learning_rate}
        exact = {name: value.hex() for name, value in values.items() if value is not None}
        self.say(step=record.step, samples=record.samples, sample_ids=self.samples, **exact)
        return record

    def _for_step(self, consumed: int) -> Any:
        batches = self.for_step(consumed)
        self.samples = [one for batch in batches for one in batch.sample_ids]
        return batches

    def _save(self, step: int, state: TrainState) -> Path:
        path = self.save(step, state)
        self.under_way.append(step)  # if asynchronous, the one before it is committed
        while len(self.under_way) > int(self.loop.checkpoints.asynchronous):
            self.say(committed=self.under_way.pop(0))
        return path

    def _say_resumed(self, step: int) -> None:
        if self.resumed is None:
            self.resumed = step
            self.say(resumed=step)


def digest_of(state: TrainState) -> str:
    """All weights and optimizer states in full, and the progress."""
    digest = hashlib.sha256(json.dumps(state.progress, sort_keys=True).encode())
    for name, tensor in sorted(state.tensors().items()):
        if name.startswith(("model.", "optimizer.")):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            digest.update(name.encode() + whole.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def start(job: Job, port: int, *, reference: bool = False) -> list[int]:
    """Start the ranks and give their process ids. This process must not have started a thread."""
    job.directory.mkdir(parents=True)
    return [_forked(_work, job, rank, port, reference) for rank in range(RANKS)]


def inspect(job: Job, report: Path) -> int:
    """Start a single process that loads every committed checkpoint and reports what is in it."""
    return _forked(_inspect, job, report)


def _work(job: Job, rank: int, port: int, reference: bool) -> int:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
    signals = StopRequest(stop_signals("USR1"))  # before the file is there: then it may be asked to stop
    with signals as stop, (job.directory / f"rank_{rank}.jsonl").open("w", buffering=1) as lines:

        def say(**line: Any) -> None:
            lines.write(json.dumps(line) + "\n")

        def watched(loop: Loop, console: Any) -> dict[str, Any]:
            watching = Watched(loop, say, digests=reference)
            result = steps(loop, console)
            watching.done(result["stopped_after"])
            return result

        steps = Loop.train
        try:
            return _command(job, job.run, watched, {}, stop)
        except BaseException as error:
            say(error=f"{type(error).__name__}: {error}"[:500], time=time.time())
            raise


def _inspect(job: Job, report: Path) -> int:
    def looked(loop: Loop, console: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for path, marker in checkpoints_in(job.checkpoints):
            try:
                loop.checkpoints.load(loop.state, path)
                found[path.name] = {"step": marker.step, "digest": digest_of(loop.state)}
            except Exception as error:
                found[path.name] = {"step": marker.step, "error": str(error)}
        report.write_text(json.dumps(found))
        return {"stopped_after": None}

    alone = {("parallel_config", "data_parallel"): 1, ("runner_config", "batch_size"): SAMPLES_IN_STEP}
    return _command(job, report.parent / "none", looked, alone)  # in another run directory: this one only looks


def _command(
    job: Job,
    run: Path,
    steps: Callable[[Loop, Any], dict[str, Any]],
    changes: dict[Any, Any],
    stop: StopRequest | None = None,
) -> int:
    """What ``lowtide train --resume auto`` does in this process, with other steps in the place of its own."""
    config = job.directory / f"config_{os.getpid()}.yaml"
    config.write_text(f"{CONFIG}    async_save: {str(job.asynchronous).lower()}\n")
    overrides = {("runner_config", "epochs"): job.epochs, **changes}
    Loop.train = steps  # type: ignore[method-assign]
    options = TrainOptions(run_directory=run, log_dir=job.directory / f"logs_{os.getpid()}", resume="auto")
    return train(config, overrides, options, stop)


def _forked(function: Callable[..., int], *arguments: Any) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        torch.set_num_threads(1)
        with open(os.devnull, "w") as nothing:  # what a killed job writes to its terminal is noise
            os.dup2(nothing.fileno(), 2)
        code = function(*arguments)
    finally:
        os._exit(code)

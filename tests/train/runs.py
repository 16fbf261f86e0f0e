"""Whole runs of the runner inside a process group that stays up."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import tide
from lowtide.models.shape import DecoderShape
from lowtide.train.commit import checkpoints_in
from lowtide.train.loop import Loop
from lowtide.train.main import prepare
from lowtide.train.options import TrainOptions
from lowtide.train.record import StepRecord
from support.layout_cases import MODELS


def train(model: str, settings: dict[str, Any], steps: int = 3, device: str = "cpu") -> list[tuple[float, float]]:
    """The losses and norms of a few steps, on every rank that calls this."""
    records = records_of(MODELS[model], settings, steps, device)
    return [(record.loss, record.global_norm or 0.0) for record in records]


def records_of(text: str, settings: dict[str, Any], steps: int = 3, device: str = "cpu") -> list[StepRecord]:
    """The first steps of the run that a file's text asks for."""
    box = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(box)
    directory = Path(box[0])
    file = directory / "run.yaml"
    if dist.get_rank() == 0:
        file.write_text(text)
    dist.barrier()
    overrides = {tuple(key.split(".")): value for key, value in settings.items()}
    options = TrainOptions(run_directory=directory / "output", log_dir=directory / "logs", watchdog=0)
    loop = prepare(file, overrides, options, torch.device(device))
    records = [loop.one(step) for step in range(1, steps + 1)]
    close(loop)
    return records


def saved(model: str, settings: dict[str, Any], directory: Path, steps: int = 2) -> None:
    """Train a few steps and save a checkpoint in a directory that all ranks see."""
    loop = _opened(MODELS[model], settings, directory)
    for step in range(1, steps + 1):
        loop.one(step)
    loop.checkpoints.save(steps, loop.state)
    close(loop)


def resumed(model: str, settings: dict[str, Any], directory: Path, steps: int = 2) -> list[tuple[float, float]]:
    """Losses and norms of the steps after those of the checkpoint that :func:`saved` made, in any layout.

    The run has a directory of its own: a process holds its directory as long as it lives.
    """
    (checkpoint,) = (directory / "output" / "checkpoints").glob("step_*")
    loop = _opened(MODELS[model], settings, _shared_directory(), resume=str(checkpoint))
    begun = loop.resume()
    records = [loop.one(step) for step in range(begun + 1, begun + 1 + steps)]
    close(loop)
    return [(record.loss, record.global_norm or 0.0) for record in records]


def _shared_directory() -> Path:
    box = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(box)
    return Path(box[0])


def parameter_after(model: str, settings: dict[str, Any], name: str, steps: int = 3) -> torch.Tensor:
    """One of this rank's parameters after some steps."""
    loop = _opened(MODELS[model], settings, _shared_directory())
    for step in range(1, steps + 1):
        loop.one(step)
    (found,) = (one for part in loop.job.models for other, one in part.named_parameters() if other == name)
    close(loop)
    return found.detach().clone()


def _opened(text: str, settings: dict[str, Any], directory: Path, resume: str | None = None) -> Loop:
    file = directory / "run.yaml"
    if dist.get_rank() == 0:
        file.write_text(text)
    dist.barrier()
    overrides = {tuple(key.split(".")): value for key, value in settings.items()}
    options = TrainOptions(run_directory=directory / "output", log_dir=directory / "logs", watchdog=0, resume=resume)
    return prepare(file, overrides, options, torch.device("cpu"))


def profiled_operators(model: str, settings: dict[str, Any]) -> tuple[list[list[str]], DecoderShape]:
    """The operators of each layer as a step of the run has them, sorted, and the model's shape."""
    box = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(box)
    directory = Path(box[0])
    file = directory / "run.yaml"
    if dist.get_rank() == 0:
        file.write_text(MODELS[model])
    dist.barrier()
    overrides: dict[tuple[str | int, ...], Any] = {tuple(key.split(".")): value for key, value in settings.items()}
    overrides["recompute_config", "select_recompute"] = {"add": True}
    options = TrainOptions(run_directory=directory / "output", log_dir=directory / "logs", watchdog=0)
    loop = prepare(file, overrides, options, torch.device("cpu"))
    loop.one(1)
    ((_, handle),) = loop.job.handles
    found = [
        sorted(one.name for one in follower.profile.catalogue) for follower in handle.followers if follower.profile
    ]
    close(loop)
    assert loop.job.shape is not None
    return found, loop.job.shape


def loaded_loss(text: str, settings: dict[str, Any]) -> float:
    """The loss of the first step with the weights that the file names."""
    directory = Path(tempfile.mkdtemp())
    (directory / "run.yaml").write_text(text)
    overrides = {tuple(key.split(".")): value for key, value in settings.items()}
    options = TrainOptions(run_directory=directory / "output", log_dir=directory / "logs", watchdog=0)
    loop = prepare(directory / "run.yaml", overrides, options, torch.device("cpu"))
    assert loop.resume() == 0
    loss = loop.one(1).loss
    close(loop)
    return loss


def close(loop: Loop) -> None:
    """End a run in a process that goes on."""
    loop.data.close()
    loop.checkpoints.close()
    for _, handle in loop.job.handles:
        handle.remove()


class Ahead(NamedTuple):
    """How far the host was ahead of a device that is slow, in nanoseconds of the virtual clock."""

    issued: int
    """Until the device had done the step that was just issued."""
    finished: int
    """The same when the step before it was finished."""
    loss: float


def host_ahead(settings: dict[str, Any], steps: int = 4) -> list[Ahead]:
    """Steps on the virtual accelerator, each finished when the next is issued, as the loop does."""
    directory = Path(tempfile.mkdtemp())
    (directory / "run.yaml").write_text(MODELS["llama"])
    tide.configure(preset="h100", flops_fp32=10**9, launch=1)
    overrides = {tuple(key.split(".")): value for key, value in settings.items()}
    options = TrainOptions(run_directory=directory / "output", log_dir=directory / "logs", watchdog=0)
    loop = prepare(directory / "run.yaml", overrides, options, torch.device("tide", 0))
    found: list[Ahead] = []
    before = loop.issue(1)
    for step in range(2, steps + 1):
        following = loop.issue(step)
        issued = tide.idle_at() - tide.now()
        record = loop.finish(before)
        found.append(Ahead(issued, tide.idle_at() - tide.now(), record.loss))
        before = following
    loop.finish(before)
    close(loop)
    return found


def whole_run(settings: dict[str, Any]) -> tuple[list[dict[str, Any]], list[int]]:
    """The metrics and the saved steps of a run on the virtual accelerator, by the loop itself."""
    directory = Path(tempfile.mkdtemp())
    (directory / "run.yaml").write_text(MODELS["llama"])
    overrides = {tuple(key.split(".")): value for key, value in settings.items()}
    options = TrainOptions(run_directory=directory / "output", log_dir=directory / "logs", watchdog=0)
    loop = prepare(directory / "run.yaml", overrides, options, torch.device("tide", 0))
    loop.train(None)
    close(loop)
    lines = (directory / "output" / "metrics.jsonl").read_text().splitlines()
    steps = [marker.step for _, marker in checkpoints_in(directory / "output" / "checkpoints")]
    return [json.loads(line) for line in lines], sorted(steps)

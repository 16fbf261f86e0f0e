"""A run from its file to its last step: the whole of ``lowtide train``, in order."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from lowtide.config.check import Check, check_file
from lowtide.config.schema.callbacks import CheckpointMonitor
from lowtide.errors import ConfigError
from lowtide.operators.names import layer_operators
from lowtide.planner.workload import Workload
from lowtide.policy import Policy
from lowtide.runtime.limits import Limits
from lowtide.train.checkpoint import Checkpoints
from lowtide.train.data.packing import packing_of
from lowtide.train.described import check_described
from lowtide.train.job import build_job
from lowtide.train.logs import start_logging, warnings_in_log
from lowtide.train.loop import CHECKPOINT_SECONDS, Loop
from lowtide.train.mesh import make_meshes, process_group, rank_seed
from lowtide.train.options import TrainOptions
from lowtide.train.run import Run, read_run
from lowtide.train.run_directory import RunDirectory, config_text, on_first_rank, open_run_directory
from lowtide.train.stop import StopRequest
from lowtide.train.utilisation import Known, known_workload
from lowtide.train.without_effect import settings_without_effect

__all__ = ["prepare", "train"]

Overrides: TypeAlias = Mapping[tuple[str | int, ...], Any]
"""Values of the file that the command line changes, by their path."""

logger = logging.getLogger(__name__)


def train(file: Path, overrides: Overrides, options: TrainOptions, stop: StopRequest | None = None) -> int:
    """Train what ``file`` says, as one rank of those that were started; the exit code.

    ``stop`` is what asks the run to save and end early.
    """
    if options.dry_run:
        from lowtide.train.dry_run import dry_run

        check = check_described(file, overrides)
        return dry_run(read_run(check), check, as_json=options.json)
    # Both before there is a process group: the model is run in one of its own.
    check = check_described(file, overrides)
    known = known_workload(check, options.device) if check.ok and os.environ.get("RANK", "0") == "0" else None
    with ExitStack() as stack:
        device = stack.enter_context(process_group(timedelta(seconds=options.timeout)))
        logs = start_logging(dist.get_rank(), options.log_dir, continued=options.restarted, redirect=options.redirect)
        stack.callback(logs.close)
        stack.enter_context(warnings_in_log())
        loop = prepare(file, overrides, options, device, check)
        loop.stop = stop
        loop.workload = _workload(known)
        result = loop.train(logs.console)
        loop.checkpoints.close()
        if options.json and dist.get_rank() == 0:
            print(json.dumps(result))
    logs.remove_empty()
    return stop.saved() if stop is not None and result["stopped_after"] else 0


def _workload(known: Known | None) -> Workload | None:
    """What the first rank knows of the step's FLOPs, on every rank; where that is nothing, the log says why, once."""
    shared = on_first_rank(lambda: known)
    if shared is None or shared.workload is None:
        logger.info("MFU is left out of the log: %s", shared.reason if shared is not None else "")
        return None
    return shared.workload


def prepare(
    file: Path, overrides: Overrides, options: TrainOptions, device: torch.device, check: Check | None = None
) -> Loop:
    """Everything before the first step, in the process group that there is; ``check`` is the file, if it is read."""
    check = check or check_file(file, layer_operators, overrides)
    run = read_run(check, dist.get_world_size(), _device_memory(device))
    assert check.settings is not None
    packing_of(check.settings, run)  # what cannot be done is said before anything is built
    meshes = make_meshes(run.degrees, device)
    torch.manual_seed(rank_seed(run, meshes))
    _limit_memory(check.settings.context.max_device_memory, device)
    if run.deterministic:
        torch.use_deterministic_algorithms(True)
    checkpoints, every = _checkpoints(check, options)
    newest = checkpoints.latest()
    policy = None if run.adapt else check.policy  # an adaptive run's is made, and written, while it trains
    directory = on_first_rank(lambda: _open(check, policy, overrides, options, newest))
    if newest is not None and directory.checkpoint is None:  # the earlier run was moved aside
        checkpoints.close()
        checkpoints, every = _checkpoints(check, options)
    _say(check, run, directory)
    limits = _limits(check)
    job = build_job(run, check.settings, policy, meshes, limits)
    return Loop(run, check.settings, meshes, job, directory, checkpoints, every, options, check.policy, limits)


def _limits(check: Check) -> Limits:
    """What swapping may take on this rank; ConfigError where the disk tier has nowhere to write."""
    limits = Limits(**check.limits.given())  # type: ignore[arg-type]  # the fields have the same names and types
    if check.limits.disk_directory is not None and not os.access(limits.disk_directory, os.W_OK | os.X_OK):
        raise ConfigError(
            f"swap limits: disk_directory {limits.disk_directory} on {socket.gethostname()} is no directory that can be"
            " written to; make it on every node, or name another (--swap-disk-directory)"
        )
    return limits


def _device_memory(device: torch.device) -> int | None:
    """The bytes of the device; None for the host, whose memory is not the run's alone."""
    return None if device.type == "cpu" else torch.accelerator.get_memory_info()[1]


def _limit_memory(most: int | None, device: torch.device) -> None:
    """``context.max_device_memory``, where the device's allocator takes a limit."""
    limit = getattr(torch.get_device_module(device), "set_per_process_memory_fraction", None)
    if most is None or device.type == "cpu":
        return
    if limit is None:
        logger.warning("context.max_device_memory has no effect: the allocator of %s takes no limit", device.type)
        return
    _, total = torch.accelerator.get_memory_info()
    limit(min(1.0, most / total), device)


def _checkpoints(check: Check, options: TrainOptions) -> tuple[Checkpoints, int]:
    """Where checkpoints go, and every how many steps; 0 for never."""
    settings = check.settings
    assert settings is not None
    directory, every, keep, asynchronous = options.run_directory / "checkpoints", 0, 0, False
    for callback in settings.callbacks:
        if isinstance(callback, CheckpointMonitor):
            every, keep, asynchronous = (
                callback.save_checkpoint_steps,
                callback.keep_checkpoint_max,
                callback.async_save,
            )
            directory = Path(callback.directory) if callback.directory else directory
    if settings.layout == "2026" and settings.checkpoint.enable_save:
        every, keep = settings.checkpoint.save_interleaved_steps, settings.checkpoint.save_max
        directory = Path(settings.checkpoint.save_path) if settings.checkpoint.save_path else directory
    # Longer than the watchdog waits for a checkpoint: it says who is missing before the others fail.
    patience = timedelta(seconds=max(2 * CHECKPOINT_SECONDS, options.timeout))
    return Checkpoints(directory, keep=keep, asynchronous=asynchronous, timeout=patience), every


def _open(
    check: Check, policy: Policy | None, overrides: Overrides, options: TrainOptions, newest: Path | None
) -> RunDirectory:
    text = Path(check.document.name).read_text(encoding="utf-8")
    directory = open_run_directory(
        options.run_directory,
        settings=check.document.value,
        config=config_text(text, overrides, check.document.value),
        checkpoint=newest,
        resume=options.resume,
        fresh=options.fresh,
        restarted=options.restarted,
    )
    if policy is not None:
        policy.save(directory.policy)
    return directory


def _say(check: Check, run: Run, directory: RunDirectory) -> None:
    """What was understood, in the words of the guides; the same on all ranks, so rank 0 says it."""
    if dist.get_rank() != 0:
        return
    for level, text in check.log:
        logger.log(getattr(logging, level), "%s", text)
    for problem in check.problems.warnings:
        logger.warning("%s:%d: %s", check.document.name, problem.line, problem.message)
    assert check.settings is not None
    for text in settings_without_effect(check.settings):
        logger.warning("%s", text)
    for text in run.warnings:
        logger.warning("%s", text)
    for note in run.notes:
        logger.info("%s", note)
    degrees = run.degrees
    logger.info(
        "ranks: %d; data %d (replicate %d x shard %d), tensor %d, context %d, pipeline %d, expert %d; %d samples"
        " a step (%d x %d micro-steps x %d ranks); %s %s",
        degrees.world,
        degrees.data,
        degrees.replicate,
        degrees.shard,
        degrees.tensor,
        degrees.context,
        degrees.pipeline,
        degrees.expert,
        run.samples_per_step,
        run.batch_size,
        run.micro_steps,
        degrees.data,
        directory.path,
        directory.reason,
    )

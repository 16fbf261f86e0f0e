"""What a step's seconds are compared with for MFU: the model's FLOPs and the device's peak, as a plan has them."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from lowtide.config.check import Check
from lowtide.cost.device import Device
from lowtide.cost.devices import find_device
from lowtide.cost.present import present_device
from lowtide.errors import PlanError
from lowtide.models.shape import shape_of
from lowtide.planner.workload import Workload, workload_of
from lowtide.train.pipeline import planned_pipeline
from lowtide.train.run import read_run
from lowtide.train.traced import TracedRank, trace_rank

__all__ = ["Known", "known_workload"]


class Known(NamedTuple):
    """What is known of a run's step before it begins."""

    workload: Workload | None
    """Its FLOPs and the device's peak; None where either is not known."""
    reason: str = ""
    """Why it is not known, in words for the log."""


def known_workload(check: Check, device: str | None) -> Known:
    """The workload of the run that a checked file asks for, traced as ``lowtide plan FILE`` does.

    ``device`` names a known device or a calibrated one's file; None for the one that is here. Call it before there is a
    process group: the ranks are imagined in one of their own. Only the first rank needs it.
    """
    found = _peak_of(device)
    if isinstance(found, str):
        return Known(None, found)
    assert check.settings is not None
    if check.settings.top_level.pretrained_model_dir:
        return Known(None, "the FLOPs of models of transformers are not counted here")
    run = read_run(check, int(os.environ.get("WORLD_SIZE", "1")))
    rank = TracedRank(
        shape=shape_of(check.settings),
        degrees=run.degrees,
        precision=run.precision,
        samples=run.batch_size,
        sequence=run.sequence,
        reshard=run.reshard,
    )
    try:
        workload = workload_of(trace_rank(rank), found, planned_pipeline(run))
    except Exception as error:  # the run itself may well work, and it is about one number of its log
        return Known(None, f"the model cannot be traced ({type(error).__name__}: {error})")
    if not workload.peak_flops:
        return Known(None, f"the peak of {found.name} in {workload.compute_dtype} is not known")
    return Known(workload)


def _peak_of(device: str | None) -> Device | str:
    """The device, or why it is not known."""
    if device is not None:
        return find_device(device)
    present = torch.accelerator.current_accelerator(check_available=True)
    if present is None:
        return "the run is on the CPU, whose peak is not known; --device names another device, or a calibrated file"
    try:
        return present_device(present)
    except PlanError as error:
        return str(error)

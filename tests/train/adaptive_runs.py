"""Runs of the runner that adapt themselves, inside a process group that stays up."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import tide
from lowtide.train.main import prepare
from lowtide.train.options import TrainOptions
from support.layout_cases import MODELS
from train.runs import close


class Ran(NamedTuple):
    """What became of a run on one rank."""

    reported: list[tuple[float, float | None]]
    """The loss and the norm of each step."""
    events: list[tuple[int, str]]
    phases: list[str]
    rescued: int
    digest: str
    """Of the Policy at the end."""
    decisions: list[str]
    """What becomes of each layer, in words."""
    files: list[str]


def run(
    model: str,
    settings: dict[str, Any],
    steps: int,
    device: str = "cpu",
    capacity: int | None = None,
    failures: dict[int, int] | None = None,
) -> Ran:
    """Train so many steps; ``failures`` says for a step which of its allocations fails."""
    box = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(box)
    file = Path(box[0]) / "run.yaml"
    if dist.get_rank() == 0:
        file.write_text(MODELS[model])
    dist.barrier()
    if device == "tide" and capacity is not None:
        tide.configure(capacity=capacity)
    overrides: dict[tuple[str | int, ...], Any] = {tuple(key.split(".")): value for key, value in settings.items()}
    options = TrainOptions(run_directory=file.parent / "output", log_dir=file.parent / "logs", watchdog=0)
    loop = prepare(file, overrides, options, torch.device(device))
    reported = []
    for step in range(1, steps + 1):
        if failures and step in failures:
            tide.faults.fail_allocation(failures[step])
        record = loop.one(step)
        loop._write_receipts(step)
        reported.append((record.loss, record.global_norm))
    tide.faults.disarm()
    adaptive = loop.adaptive
    if adaptive is None:
        close(loop)
        return Ran(reported, [], [], 0, "", [], [])
    assert loop.job.handles == ()
    adaptive.remove()
    close(loop)
    return Ran(
        reported,
        [(event.step, event.kind) for event in adaptive.events],
        [step.phase for step in adaptive.steps],
        sum(step.rescued for step in adaptive.steps),
        adaptive.policy.digest,
        [str(layer) for layer in adaptive.policy.layers],
        sorted(one.name for one in (file.parent / "output").iterdir()),
    )

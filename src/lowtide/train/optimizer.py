"""AdamW over a model's parts, with a learning rate for each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lowtide.config.schema import Settings
from lowtide.train.learning_rate import Schedule, groups_of, schedule_of

__all__ = ["LearningRates", "make_optimizers"]

FUSED = ("cpu", "cuda", "xpu")
"""Devices whose torch build has AdamW as one kernel."""


class LearningRates:
    """Sets the learning rate of every parameter group before a step."""

    def __init__(self, default: Schedule, groups: Sequence[tuple[dict[str, Any], Schedule]]) -> None:
        self.default, self.groups = default, groups

    def set(self, step: int) -> float:
        """Set the rates of ``step``, from 0; the default rate."""
        for group, schedule in self.groups:
            group["lr"] = schedule(step)
        return self.default(step)


def make_optimizers(
    settings: Settings,
    parts: Sequence[nn.Module],
    names: Callable[[], Sequence[str]],
    *,
    steps: int,
    steps_in_epoch: int,
) -> tuple[list[torch.optim.Optimizer], LearningRates]:
    """One AdamW for each part; ``names`` gives the parameters of the whole model.

    Norms and biases, everything of one dimension, do not decay.
    """
    given = settings.optimizer
    betas = (given.betas[0], given.betas[1]) if given.betas else (0.9, 0.999)
    span: dict[str, Any] = {
        "total_steps": steps,
        "steps_per_epoch": steps_in_epoch,
        "default_rate": given.learning_rate,
    }
    default = schedule_of(settings.lr_schedule, **span)
    schedules: dict[str, Schedule] = {}
    if settings.grouped_lr_schedule.grouped:
        for group in groups_of(names(), settings.lr_schedule, settings.grouped_lr_schedule, **span):
            schedules.update(dict.fromkeys(group.parameters, group.schedule))
    optimizers: list[torch.optim.Optimizer] = []
    rates: list[tuple[dict[str, Any], Schedule]] = []
    for part in parts:
        # One kernel updates a whole group, so its parameters must be sharded over the same ranks.
        groups: dict[tuple[Schedule, bool, DeviceMesh | None], list[nn.Parameter]] = {}
        for name, parameter in part.named_parameters():
            if parameter.requires_grad:
                mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
                groups.setdefault((schedules.get(name, default), parameter.dim() > 1, mesh), []).append(parameter)
        optimizer = torch.optim.AdamW(
            [
                {"params": parameters, "weight_decay": given.weight_decay if decays else 0.0}
                for (_, decays, _), parameters in groups.items()
            ],
            lr=default(0),
            betas=betas,
            eps=given.eps,
            fused=next(part.parameters()).device.type in FUSED or None,
        )
        rates += [(group, schedule) for group, (schedule, *_) in zip(optimizer.param_groups, groups, strict=True)]
        optimizers.append(optimizer)
    return optimizers, LearningRates(default, rates)

"""Somebody's loop on tide that notes which of its steps are watched."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
import tide
from lowtide._torch_private.modes import dispatch_modes_on
from lowtide._torch_private.saved_tensor_hooks import top_saved_tensors_hooks
from lowtide.adaptive.session import Adaptive
from lowtide.adaptive.suspicion import SETTLING
from support.garbage import collect_garbage
from tide import faults

WIDTH, PROFILING, ROWS = 64, 5, 64
PLANNED = PROFILING + SETTLING + 1
"""Steps before the first that is not watched."""


class Net(nn.Module):
    """Notes which of its calls are watched."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4))
        self.watched: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        hooks = top_saved_tensors_hooks(False)
        self.watched.append(bool(dispatch_modes_on()))
        assert self.watched[-1] or hooks is None
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Loop:
    """Somebody's loop on tide, the same every time."""

    def __init__(self) -> None:
        collect_garbage()
        torch.accelerator.empty_cache()  # segments of other tests are not part of what was planned
        tide.reset()
        tide.configure(preset="h100", capacity=1 << 30)
        torch.manual_seed(0)
        self.model = Net().to("tide")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.number = 0
        self.losses: list[float] = []

    def step(self, rows: int = ROWS) -> float:
        self.number += 1
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(self.number)).to("tide")
        self.optimizer.zero_grad()
        loss = self.model(x)
        loss.backward()
        self.optimizer.step()
        self.losses.append(float(loss.detach()))
        return self.losses[-1]

    def adapt(self, **options: Any) -> Adaptive:
        return lowtide.adapt(self.model, self.optimizer, profiling_steps=PROFILING, verbose=False, **options)

    def was_watched(self, rows: int = ROWS) -> bool:
        """Run a step, and say whether all of it was watched."""
        before = len(self.model.watched)
        self.step(rows)
        (found,) = self.model.watched[before:]
        return found


def one_rank_is_short(failing: int) -> tuple[list[bool], list[float], list[str]]:
    """In a step of its own one rank has a larger batch than any before, which does not fit."""
    try:
        return _one_rank_is_short(failing)
    finally:
        collect_garbage()  # these processes run other tests
        assert torch.accelerator.memory_allocated() == 0


def _one_rank_is_short(failing: int) -> tuple[list[bool], list[float], list[str]]:
    loop = Loop()

    def step(rows: int = ROWS) -> None:
        loop.number += 1
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(loop.number)).to("tide")
        loop.optimizer.zero_grad()
        loss = loop.model(x)
        loss.backward()
        for parameter in loop.model.parameters():  # by hand: DistributedDataParallel never frees its parameters
            assert parameter.grad is not None
            mean = parameter.grad.cpu()
            dist.all_reduce(mean)
            parameter.grad.copy_(mean / dist.get_world_size())
        loop.optimizer.step()
        loop.losses.append(float(loss.detach()))

    if failing < 0:
        for number in range(PLANNED + 12):
            step(4096 if number == PLANNED and dist.get_rank() == 1 else ROWS)
        return [], loop.losses, []
    with lowtide.adapt(loop.model, loop.optimizer, profiling_steps=PROFILING, verbose=False) as run:
        for number in range(PLANNED + 12):
            if number == PLANNED and dist.get_rank() == failing:
                faults.shrink_capacity(30, 1 << 20)
            step(4096 if number == PLANNED and dist.get_rank() == failing else ROWS)
            faults.disarm()
        return loop.model.watched, loop.losses, [event.kind for event in run.events]

"""A model that is trained on batches of different lengths, alone or on ranks that have different ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
import tide
from support.garbage import collect_garbage

WIDTH = 32


class Layer(nn.Module):
    """Keeps a number for every pair of tokens. If it ``communicates``, it scales by a mean over all ranks."""

    def __init__(self, communicates: bool) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        self.act = nn.GELU()
        self.communicates = communicates

    def forward(self, x: Tensor) -> Tensor:
        if self.communicates:
            mean = x.detach().square().mean()
            dist.all_reduce(mean)
            x = x / (1 + mean)
        scores = torch.softmax(x @ x.transpose(-2, -1), -1)
        return x + self.act(self.project(scores @ x))


class Net(nn.Module):
    """Four layers and a loss."""

    def __init__(self, communicates: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(communicates) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Loop:
    """Somebody's loop on tide, the same from the same start."""

    def __init__(self, communicates: bool = False) -> None:
        collect_garbage()
        torch.accelerator.empty_cache()
        tide.reset()
        tide.configure(preset="h100", capacity=1 << 30)
        torch.manual_seed(0)
        self.model = Net(communicates).to("tide")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.number = 0

    def batch(self, length: int) -> Tensor:
        self.number += 1
        return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(self.number)).to("tide")

    def step(self, *lengths: int) -> float:
        """A step on micro-batches of these lengths, averaged over all ranks; its loss."""
        self.optimizer.zero_grad()
        loss = 0.0
        for length in lengths:
            part = self.model(self.batch(length))
            part.backward()
            loss += float(part.detach())
        if dist.is_initialized():
            for parameter in self.model.parameters():  # by hand: DistributedDataParallel never frees its parameters
                mean = parameter.grad.cpu() if parameter.grad is not None else torch.zeros_like(parameter, device="cpu")
                dist.all_reduce(mean)
                parameter.grad = (mean / dist.get_world_size()).to("tide")
        self.optimizer.step()
        return loss

    def adapt(self, **options: Any) -> lowtide.adaptive.session.Adaptive:
        return lowtide.adapt(self.model, self.optimizer, verbose=False, **options)


def on_ranks(
    adapted: bool, given: bool, idle: bool, communicates: bool
) -> tuple[list[float], list[tuple[int, ...]], list[str]]:
    """The losses of 40 steps in which each rank has another length, the buckets and the events.

    ``given``: the run is given the steps. ``idle``: in some steps the second rank has no batch.
    """
    try:
        return _on_ranks(adapted, given, idle, communicates)
    finally:
        collect_garbage()  # these processes run other tests
        assert torch.accelerator.memory_allocated() == 0


def _on_ranks(
    adapted: bool, given: bool, idle: bool, communicates: bool
) -> tuple[list[float], list[tuple[int, ...]], list[str]]:
    rank = dist.get_rank()
    drawn = torch.randint(16, 160, (40, 2), generator=torch.Generator().manual_seed(3)).tolist()
    batches = [[lengths[rank]] if rank == 0 or not idle or number % 7 else [] for number, lengths in enumerate(drawn)]
    loop, buckets = Loop(communicates), []
    if not adapted:
        return [loop.step(*lengths) for lengths in batches], [], []
    losses = []
    run = loop.adapt(watch="always")
    if not given:
        run.__enter__()
    for lengths in batches:
        losses.append(run.step(lambda lengths=lengths: loop.step(*lengths)) if given else loop.step(*lengths))
        buckets.append(run.bucket)
    events = [event.kind for event in run.events]
    run.remove()
    return losses, buckets, events

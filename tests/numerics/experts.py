"""Expert parallelism whose ranks differ in control flow: each leaves out those of its experts that got no tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from numerics.layouts import train
from numerics.model import WIDTH, FeedForward, Llama, Value
from numerics.policies import apply_column

RARE = 1.7
"""A token whose first number is above this goes to a rank's second expert: in some steps there is none on a rank."""


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(rows)))


class ExchangingFeedForward(FeedForward):
    """A dense block, and beside it two experts on each rank, to which tokens are sent and from which they come back."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        dense, tokens = super().forward(x), x.flatten(0, 1)
        ranks = dist.get_world_size()
        with torch.no_grad():
            # Rank 0 has the experts 0 and 1, rank 1 the experts 2 and 3; on rank 1 nothing is rare.
            expert = (tokens[:, 1] > 0) * 2 + torch.where(
                tokens[:, 1] > 0, (tokens[:, 2] > 0).long(), (tokens[:, 0] > RARE).long()
            )
            order = expert.argsort(stable=True)
            counts = torch.bincount(expert, minlength=2 * ranks)
            arriving = torch.empty_like(counts)
            dist.all_to_all_single(arriving, counts)
            sent, received = counts.view(ranks, -1).sum(1).tolist(), arriving.view(ranks, -1).sum(1).tolist()
            mine = torch.arange(2, device=x.device).repeat(ranks).repeat_interleave(arriving)
        rows = all_to_all_single_autograd(tokens[order], received, sent, dist.group.WORLD)
        answers = torch.zeros_like(rows)
        for number, one in enumerate(self.experts):
            places = (mine == number).nonzero().flatten()
            if len(places):
                answers = answers.index_add(0, places, one(rows[places]))
        back = all_to_all_single_autograd(answers, sent, received, dist.group.WORLD)
        return dense + torch.zeros_like(tokens).index_copy(0, order, back).view_as(x)


def exchanging(model: Llama, device: str) -> Llama:
    """The model with experts: the same in every run, others on each rank."""
    torch.manual_seed(7 + dist.get_rank())
    for layer in model.layers:
        experts = ExchangingFeedForward().to(device)
        experts.load_state_dict(layer.feed_forward.state_dict(), strict=False)
        layer.feed_forward = experts
    return model


def expert_parallel(column: str | None, device: str = "cpu") -> list[Value]:
    def layout(model: Llama, column: str | None, device: str) -> tuple[nn.Module, Any]:
        handle = apply_column(column, exchanging(model, device))
        return model, handle

    return train(layout, column, device)


def expert_parallel_and_fsdp2(column: str | None, device: str = "cpu") -> list[Value]:
    def layout(model: Llama, column: str | None, device: str) -> tuple[nn.Module, Any]:
        handle = apply_column(column, exchanging(model, device))
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, ignored_params=set(layer.feed_forward.experts.parameters()))
        experts = {one for layer in model.layers for one in layer.feed_forward.experts.parameters()}
        fully_shard(model, mesh=mesh, ignored_params=experts)
        return model, handle

    return train(layout, column, device)


def diverged(column: str) -> list[bool]:
    """For each layer, whether this rank's control flow diverged from what was profiled."""
    handles: list[Any] = []

    def layout(model: Llama, column: str | None, device: str) -> tuple[nn.Module, Any]:
        handles.append(apply_column(column, exchanging(model, device)))
        return model, handles[0]

    train(layout, column, "cpu")
    return [follower.own_profile is not None for follower in handles[0].followers]

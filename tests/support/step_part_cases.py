"""Steps in parts on several ranks: what a spawned process can import."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lowtide
import tide

__all__ = ["MICRO", "WIDTH", "Net", "spoilt_on_one_rank"]

WIDTH, MICRO = 32, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.BatchNorm1d(WIDTH)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def spoilt_on_one_rank(failing: int) -> tuple[list[Tensor], int]:
    """An operator of one rank fails after it may have written; both ranks train, in parts of a step."""
    tide.configure(preset="h100", capacity=1 << 30)
    torch.manual_seed(0)
    model = Net().to("tide")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = lowtide.adapt(model, optimizer, watch="always", verbose=False)
    runs = 0
    with run:
        for step in range(3):
            for number in range(MICRO):

                def micro_batch(step: int = step, number: int = number) -> None:
                    nonlocal runs
                    runs += 1
                    model(torch.ones(4, WIDTH, device="tide") * (number + 1)).backward()
                    if (step, number, dist.get_rank()) == (1, 1, failing) and runs == MICRO + 2:
                        assert run.rescue is not None
                        run.rescue.spoil("aten.add_")

                run.part(micro_batch, last=number == MICRO - 1)
            optimizer.step()
            optimizer.zero_grad()
    return [one.detach().cpu() for one in model.state_dict().values()], runs

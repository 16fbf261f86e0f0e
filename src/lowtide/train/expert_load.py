"""What the runner has to do about routers in each step: weigh their losses, move their bias, tell their load."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowtide.models.router import (
    auxiliary_losses,
    expert_fractions,
    reset_expert_counts,
    routers_of,
    set_auxiliary_scale,
    update_expert_bias,
)
from lowtide.train.drop_rate import mean_drop_rates, summed_drop_rates

__all__ = ["ExpertLoad"]


class ExpertLoad:
    """The routers of this rank's parts of the model; nothing for a dense model."""

    def __init__(
        self, parts: Sequence[nn.Module], data: dist.ProcessGroup, device: torch.device, *, layers: int, experts: int
    ) -> None:
        self.parts = [part for part in parts if routers_of(part)]
        self.data, self.device, self.layers, self.experts = data, device, layers, experts
        self.capacity: float | None = None
        """The capacity factor that drop rates are told for; None to tell none."""

    def begin(self, scale: float) -> None:
        """A step begins; a micro batch's loss is multiplied by ``scale`` before backward."""
        for part in self.parts:
            reset_expert_counts(part)
            set_auxiliary_scale(part, scale)

    def end(self) -> None:
        """A step is over: experts with too much load get a lower bias."""
        for part in self.parts:
            update_expert_bias(part, self.data)

    def told(self) -> Tensor:
        """What ranks add up, in one vector: the routers' losses, then the drop rate of every layer of the model."""
        losses = [loss for part in self.parts for loss in auxiliary_losses(part).values()]
        total = torch.stack(losses).sum().reshape(1) if losses else torch.zeros(1, device=self.device)
        if self.capacity is None:
            return total
        fractions = torch.zeros(self.layers, self.experts, device=self.device)
        for part in self.parts:
            for layer, found in expert_fractions(part).items():
                fractions[layer] = found
        return torch.cat((total, summed_drop_rates(fractions, self.capacity).flatten()))

    def drop_rates(self, told: Tensor) -> dict[int, float]:
        """The drop rate of each layer that routed anything, from what all ranks told together."""
        return mean_drop_rates(told[1:].view(-1, 2)) if self.capacity is not None else {}

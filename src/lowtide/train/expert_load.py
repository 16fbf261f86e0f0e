"""Auxiliary losses, and what routers need in each step: weigh the losses, move biases, report the load."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowtide.models.auxiliary import auxiliaries_of, set_auxiliary_scale
from lowtide.models.prediction import prediction_loss
from lowtide.models.router import auxiliary_losses, expert_bias_changes, expert_fractions, reset_expert_counts
from lowtide.train.drop_rate import mean_drop_rates, summed_drop_rates

__all__ = ["ExpertLoad"]


class ExpertLoad:
    """The routers and prediction layers of this rank's parts of the model; nothing for a plain one."""

    def __init__(
        self, parts: Sequence[nn.Module], data: dist.ProcessGroup, device: torch.device, *, layers: int, experts: int
    ) -> None:
        self.parts = [part for part in parts if auxiliaries_of(part)]
        self.data, self.device, self.layers, self.experts = data, device, layers, experts
        self.capacity: float | None = None
        """The capacity factor that drop rates are reported for; None to report none."""

    def begin(self, scale: float) -> None:
        """A step begins; a micro-batch's loss is multiplied by ``scale`` before backward."""
        for part in self.parts:
            reset_expert_counts(part)
            set_auxiliary_scale(part, scale)

    def changes(self) -> list[tuple[Tensor, Tensor]]:
        """How the routers' biases are to move after the step: experts with too much load get a lower one."""
        return [change for part in self.parts for change in expert_bias_changes(part, self.data)]

    def reported(self) -> Tensor:
        """What ranks add up, in one vector: routers' losses, prediction layers', then each layer's drop rate."""
        losses = torch.zeros(2, device=self.device)
        for part in self.parts:
            for loss in auxiliary_losses(part).values():
                losses[0] += loss
            predicted = prediction_loss(part)
            if predicted is not None:
                losses[1] += predicted
        if self.capacity is None:
            return losses
        fractions = torch.zeros(self.layers, self.experts, device=self.device)
        for part in self.parts:
            for layer, found in expert_fractions(part).items():
                fractions[layer] = found
        return torch.cat((losses, summed_drop_rates(fractions, self.capacity).flatten()))

    def losses(self, reported: Tensor, micro_steps: int) -> dict[str, float]:
        """The auxiliary losses by name, from the sum of what all ranks reported."""
        if not self.parts:
            return {}
        auxiliary, predicted = (reported[:2] / micro_steps).tolist()
        return {"auxiliary": auxiliary, **({"mtp": predicted} if predicted else {})}

    def drop_rates(self, reported: Tensor) -> dict[int, float]:
        """The drop rate of each layer that routed anything, from the sum of what all ranks reported."""
        return mean_drop_rates(reported[2:].view(-1, 2)) if self.capacity is not None else {}

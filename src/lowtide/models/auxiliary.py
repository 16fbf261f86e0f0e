"""Auxiliary losses: they reach the gradient where they arise, so that no pipeline stage hands them on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lowtide._torch_private.backward import current_backward

__all__ = ["Auxiliary", "auxiliaries_of", "set_auxiliary_scale"]


class Auxiliary:
    """What a module's own loss weighs in the gradients, and what it was. No module and no buffer: it is this rank's."""

    def __init__(self) -> None:
        self.value: Tensor | None = None
        """The sum of the loss, each micro-batch's once, since the last reset."""
        self.weight = 1.0
        self.scale: Tensor | None = None

    def attach(self, output: Tensor, loss: Tensor) -> Tensor:
        """``output`` as it is; when backward comes to it, ``loss`` gets a gradient too."""
        if current_backward() == -1:  # otherwise it is recomputed, and was recorded when it first ran
            known = loss.detach()
            self.value = known if self.value is None else self.value + known
        if not (torch.is_grad_enabled() and output.requires_grad):
            return output
        if self.scale is None or self.scale.device != output.device:
            self.scale = torch.tensor(self.weight, device=output.device)
        attached: Tensor = _Attach.apply(output, loss, self.scale)
        return attached

    def set_scale(self, scale: float) -> None:
        """What the loss is multiplied by, from the next backward on."""
        self.weight = scale
        if self.scale is not None:
            self.scale.fill_(scale)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.scale = scale  # no saved tensor: it is meant to be what it is when backward runs
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], ctx.scale.clone(), None


def set_auxiliary_scale(model: nn.Module, scale: float) -> None:
    """What the losses of routers and of prediction layers weigh in the gradients of a micro-batch, from now on.

    It is what the micro-batch's main loss is multiplied by before backward: the loss scale over the number of micro
    batches. With several model parts on a rank, call it for each.
    """
    for auxiliary in auxiliaries_of(model):
        auxiliary.set_scale(scale)


def auxiliaries_of(model: nn.Module) -> list[Auxiliary]:
    """The auxiliary losses of a model."""
    found = (getattr(module, "auxiliary", None) for module in model.modules())
    return [one for one in found if isinstance(one, Auxiliary)]

"""The router of a mixture of experts: which experts each token goes to, with what weight, and its losses."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from lowtide._torch_private.backward import current_backward
from lowtide.models.auxiliary import Auxiliary, auxiliaries_of
from lowtide.models.experts_shape import ExpertsShape

__all__ = [
    "Router",
    "Routing",
    "auxiliary_losses",
    "count_slots",
    "expert_bias_changes",
    "expert_fractions",
    "reset_expert_counts",
    "routers_of",
    "update_expert_bias",
]


class Routing(NamedTuple):
    """Where each token goes."""

    weights: Tensor
    """``[tokens, chosen]``: what the answer of each chosen expert is multiplied by."""
    experts: Tensor
    """``[tokens, chosen]``: the chosen experts."""


class Router(nn.Module):
    """Scores every expert for every token and chooses the best. It is one operator, its losses included."""

    expert_bias: Tensor | None

    def __init__(self, shape: ExpertsShape, width: int) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.empty(shape.count, width))
        self.register_buffer("expert_bias", torch.zeros(shape.count, dtype=torch.float32) if shape.bias else None)
        self.counts: Tensor | None = None
        """Slots that chose each expert since the last reset. No buffer: no wrapper may copy it from another rank."""
        self.auxiliary = Auxiliary()
        nn.init.normal_(self.weight, std=0.02)

    def make_buffers(self) -> None:
        """The bias as it begins."""
        if self.expert_bias is not None:
            self.expert_bias.zero_()

    def forward(self, hidden: Tensor) -> Routing:
        """``hidden`` is ``[batch, sequence, width]``."""
        shape = self.shape
        # In single precision whatever the rest is in: a score that is rounded sends a token elsewhere.
        with torch.autocast(hidden.device.type, enabled=False):
            logits = functional.linear(hidden.float(), self.weight.float())
            scores = logits.softmax(-1) if shape.scoring == "softmax" else logits.sigmoid()
            with torch.no_grad():
                experts = self._choose(scores.detach())
            weights = scores.gather(-1, experts)
            if shape.normalised and shape.chosen > 1:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
            weights = weights * shape.scaling
            losses = self._losses(logits, scores, experts)
        if losses is not None and self.training:
            weights = self.auxiliary.attach(weights, losses)
        self._record(experts)
        return Routing(weights.flatten(0, 1), experts.flatten(0, 1))

    def _choose(self, scores: Tensor) -> Tensor:
        shape = self.shape
        if self.expert_bias is not None:
            scores = scores + self.expert_bias
        if shape.chosen_groups < shape.groups:
            grouped = scores.unflatten(-1, (shape.groups, -1))
            # A group is as good as its best expert; with a bias, as its two best together.
            best = grouped.topk(min(2, grouped.shape[-1]) if shape.bias else 1, dim=-1).values.sum(-1)
            allowed = torch.zeros_like(best).scatter(-1, best.topk(shape.chosen_groups, dim=-1).indices, 1.0).bool()
            scores = grouped.masked_fill(~allowed.unsqueeze(-1), -torch.inf).flatten(-2)
        return scores.topk(shape.chosen, dim=-1).indices

    def _losses(self, logits: Tensor, scores: Tensor, experts: Tensor) -> Tensor | None:
        shape = self.shape
        parts = []
        if shape.auxiliary and shape.balancing != "none":
            share = scores if shape.scoring == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)
            chosen = torch.zeros_like(share).scatter(-1, experts, 1.0)
            # Over each sequence by itself the mean over sequences is the same however they are split among ranks.
            over = (1,) if shape.balancing == "seq_aux_loss" else (0, 1)
            fractions = chosen.mean(over) / shape.chosen
            parts.append(shape.auxiliary * shape.count * (fractions * share.mean(over)).sum(-1).mean())
        if shape.z_loss:
            parts.append(shape.z_loss * logits.logsumexp(-1).square().mean())
        return sum(parts[1:], parts[0]) if parts else None

    def _record(self, experts: Tensor) -> None:
        if current_backward() != -1 or not self.training:
            return  # recomputed in backward: it was recorded when it first ran
        with torch.no_grad():
            counts = count_slots(experts, self.shape.count)
            self.counts = counts if self.counts is None else self.counts + counts


def count_slots(experts: Tensor, count: int) -> Tensor:
    """How many slots chose each expert. Unlike ``bincount`` its size is known beforehand, so that it can be traced."""
    flat = experts.flatten()
    return flat.new_zeros(count).scatter_add(0, flat, torch.ones_like(flat))


def routers_of(model: nn.Module) -> dict[int, Router]:
    """The routers of a model, by the number of their layer in the whole model."""
    found: dict[int, Router] = {}
    for name, module in model.named_modules():
        if isinstance(module, Router):
            parts = name.split(".")
            number = next((int(part) for part in parts if part.isdigit()), len(found))
            found[number] = module
    return found


def auxiliary_losses(model: nn.Module) -> dict[int, Tensor]:
    """By layer, the sum of a router's losses over the micro-batches since the last reset, on this rank."""
    routers = routers_of(model).items()
    return {number: one.auxiliary.value for number, one in routers if one.auxiliary.value is not None}


def expert_fractions(model: nn.Module) -> dict[int, Tensor]:
    """By layer, the fraction of this rank's routed slots that chose each expert since the last reset.

    A layer that has routed nothing has all zeros.
    """
    found = {}
    for number, router in routers_of(model).items():
        if router.counts is not None:
            found[number] = router.counts / router.counts.sum().clamp(min=1)
    return found


def reset_expert_counts(model: nn.Module) -> None:
    """Begin a new step: nothing routed, and no losses, those of prediction layers included."""
    for router in routers_of(model).values():
        router.counts = None
    for auxiliary in auxiliaries_of(model):
        auxiliary.value = None


def expert_bias_changes(model: nn.Module, group: dist.ProcessGroup | None = None) -> list[tuple[Tensor, Tensor]]:
    """After a step, how each router's bias is to move against its load: the bias, and what to add to it.

    The load is summed over ``group``, one reduction for all layers: the ranks that see different tokens, data-parallel
    ones, expert-parallel ones included. All of them have to call it. None for this rank alone.
    """
    biased = [(one, one.expert_bias) for one in routers_of(model).values() if one.expert_bias is not None]
    if not biased:
        return []
    with torch.no_grad():
        counts = [torch.zeros_like(bias) if router.counts is None else router.counts for router, bias in biased]
        loads = torch.stack([one.float() for one in counts])
        if group is not None:
            dist.all_reduce(loads, group=group)
        steps = (loads.mean(-1, keepdim=True) - loads).sign()
        return [(bias, step * router.shape.bias_rate) for (router, bias), step in zip(biased, steps, strict=True)]


def update_expert_bias(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Move the bias of each expert as :func:`expert_bias_changes` says."""
    with torch.no_grad():
        for bias, change in expert_bias_changes(model, group):
            bias.add_(change)

"""The share of routed slots beyond the experts' capacity, layer by layer: ``MoEDropRateCallback``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["drop_rate", "line", "mean_drop_rates", "meaning", "summed_drop_rates"]


def drop_rate(fractions: Tensor | Sequence[float] | Sequence[Sequence[float]], capacity_factor: float) -> float | None:
    """The share of routed slots that experts had no room for; None if no slot was routed.

    ``fractions`` is for each expert the share of the routed slots that chose it, or a row of these for each
    data-parallel rank; the rate is the mean over the rows. An expert has room for ``capacity_factor`` times the even
    share.

    >>> round(drop_rate([0.7, 0.1, 0.1, 0.1], capacity_factor=1.5), 5)
    0.325
    """
    rows = torch.as_tensor(fractions, dtype=torch.float64)
    rows = rows.reshape(-1, rows.shape[-1])
    return mean_drop_rates(summed_drop_rates(rows, capacity_factor).sum(0, keepdim=True)).get(0)


def summed_drop_rates(fractions: Tensor, capacity_factor: float) -> Tensor:
    """For each row of ``fractions``, [layers, experts], the rate and 1, or zeros where no slot was routed.

    What ranks have to add up, in one all-reduce for all layers and without waiting for the device, before
    :func:`mean_drop_rates`.
    """
    beyond = (fractions - capacity_factor / fractions.shape[-1]).clamp(min=0).sum(-1)
    routed = (fractions.sum(-1) > 0).to(beyond.dtype)
    return torch.stack([beyond * routed, routed], dim=-1)


def mean_drop_rates(summed: Tensor) -> dict[int, float]:
    """By layer the mean rate over the ranks that routed anything; layers without any are left out."""
    return {layer: rate / ranks for layer, (rate, ranks) in enumerate(summed.tolist()) if ranks > 0}


def line(layer: int, rate: float) -> str:
    """The line of one layer, in the words of the MindSpore Transformers guide."""
    return f"layer: {layer}, drop_rate: {rate:.5f}"


def meaning(factor: float, capacity: float | None) -> str:
    """What a run's rates mean: ``factor`` is the callback's, ``capacity`` the model's, None if nothing is dropped."""
    what = (
        f"drop_rate: of the slots that a layer's router filled in the step, the share beyond {factor:g} x the even"
        " share of an expert; the mean over data-parallel ranks"
    )
    if capacity is None:
        return f"{what}. This run drops no token (use_gmm, or no capacity): it is what such a capacity would drop"
    if capacity != factor:
        return f"{what}. The model's capacity factor is {capacity:g}, which drops another share"
    return f"{what}. Experts drop them micro-batch by micro-batch, so that single ones may lose more"

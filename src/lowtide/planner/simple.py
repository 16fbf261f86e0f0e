"""The Policies that people write by hand: what a plan is compared with, and never slower than."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lowtide.policy import LayerPolicy, Policy, Recompute, Swap

__all__ = ["FULL", "NOTHING", "SimplePolicy", "simple_policies"]

NOTHING = "keep everything"
FULL = "recompute every layer"


class SimplePolicy(NamedTuple):
    """A Policy that is one line of a file."""

    name: str
    policy: Policy
    how: str
    """What to write to get it."""


def simple_policies(layers: int, *, swap: bool = True, recompute: bool = True) -> Iterator[SimplePolicy]:
    """The simple Policies for a model of so many layers, the fastest first where memory is plentiful."""
    keep = LayerPolicy()
    again = LayerPolicy(default=Recompute())
    yield SimplePolicy(NOTHING, _policy(keep, layers), "nothing")
    if swap:
        away = LayerPolicy(default=Swap(1, unit="layers"))
        how = "swap_config: {swap: True, layer_swap: [{backward_prefetch: 1, layers: True}]}"
        yield SimplePolicy("swap every layer", _policy(away, layers), how)
    if recompute:
        for every in (4, 3, 2):
            mixed = tuple(again if layer % every == 0 else keep for layer in range(layers))
            yield SimplePolicy(f"recompute one layer in {every}", Policy(mixed, origin="solver"), "recompute_config")
        yield SimplePolicy(FULL, _policy(again, layers), "recompute_config: {recompute: True}")
    if recompute and swap:
        both = LayerPolicy(default=Recompute(), boundary=Swap(1, unit="layers"))
        name = "recompute every layer, swap its input"
        yield SimplePolicy(name, _policy(both, layers), "a Policy from `lowtide plan`")


def _policy(layer: LayerPolicy, layers: int) -> Policy:
    return Policy((layer,) * layers, origin="solver")

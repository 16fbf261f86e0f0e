"""The Policies that every layout is tried with: the columns of the matrix in the docs."""

from __future__ import annotations

import pytest
from torch import nn

from lowtide.policy import LayerPolicy, Pattern, Policy, Recompute, Rule, Swap
from lowtide.runtime.apply import Handle, apply
from lowtide.runtime.limits import Limits

EVERYTHING = Pattern(".*", "path")
MIXED = (
    LayerPolicy(
        rules=(
            Rule(Pattern("feed_forward.silu"), Recompute()),
            Rule(Pattern("feed_forward.mul"), Recompute()),
            Rule(Pattern("attention.wq"), Swap(1)),
            Rule(Pattern("feed_forward.w3"), Swap(30)),
        )
    ),
    LayerPolicy(
        Swap(7),
        rules=(Rule(Pattern("attention_norm"), Recompute()), Rule(Pattern("attention.wv"), Swap(2, "disk"))),
        boundary=Swap(3),
    ),
    LayerPolicy(Recompute(), rules=()),
    LayerPolicy(),
)
LAYERS: dict[str, tuple[LayerPolicy, ...]] = {
    "recompute operators": (LayerPolicy(rules=(Rule(EVERYTHING, Recompute()),)),),
    "recompute layers": (LayerPolicy(Recompute()),),
    "swap": (LayerPolicy(Swap(5), boundary=Swap(5)),),
    "swap to disk": (LayerPolicy(Swap(3, "disk"), boundary=Swap(2, "disk")),),
    "boundary swap": (LayerPolicy(Recompute(), boundary=Swap(4)),),
    "mixed": MIXED,
}
"""For each column, the settings of the layers in turn."""

RECOMPUTING = {"recompute operators", "mixed"}
SWAPPING = {"swap", "swap to disk", "boundary swap", "mixed"}

every_policy = pytest.mark.parametrize("column", LAYERS)


def policy_of(column: str, layers: int) -> Policy:
    settings = LAYERS[column]
    layers_in_turn = tuple(settings[index % len(settings)] for index in range(layers))
    return Policy(layers_in_turn, origin="solver")


def apply_column(column: str | None, model: nn.Module, layers: str = "layers") -> Handle | None:
    """Apply the column's Policy to a model; None for a run without lowtide."""
    if column is None:
        return None
    count = len(list(model.get_submodule(layers).children()))
    return apply(model, policy_of(column, count), layers=layers, limits=Limits(minimum_bytes=1))


def idle(column: str, handle: Handle) -> str:
    """What the Policy asked for and the run did not do; empty if it did all."""
    lines = handle.ledger.lines.values()
    missing = []
    recomputed = sum(line.recomputes for line in lines) + sum(one.freed() for one in handle.compiled_bytes().values())
    if column in RECOMPUTING and not recomputed:
        missing.append("nothing was recomputed")
    if column in SWAPPING and not sum(line.swaps for line in lines):
        missing.append("nothing was swapped")
    return ", ".join(missing)

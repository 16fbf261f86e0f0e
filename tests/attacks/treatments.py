"""The forms in which a program is given lowtide: Policies that are applied, and adaptive runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lowtide.policy import LayerPolicy, Pattern, Policy, Recompute, Rule, Swap

__all__ = ["ADAPTED", "APPLIED", "EVERY", "RECOMPUTED", "SWAPPED", "TREATMENTS", "Treatment"]


KEEP = LayerPolicy()
EACH_OPERATOR = LayerPolicy(rules=(Rule(Pattern(".*", "path"), Recompute()),))


@dataclass(frozen=True)
class Treatment:
    """One way to use lowtide on a program."""

    layer: LayerPolicy = KEEP
    """What becomes of every layer."""
    adapt: Literal["", "steps", "loop"] = ""
    """Whether the run adapts itself: each step given to ``run.step``, or the loop inside ``with``."""

    def policy(self, layers: int) -> Policy:
        return Policy((self.layer,) * layers, origin="solver")


TREATMENTS = {
    "operators": Treatment(EACH_OPERATOR),
    "layers": Treatment(LayerPolicy(Recompute())),
    "swap": Treatment(LayerPolicy(Swap(5), boundary=Swap(5))),
    "swap late": Treatment(LayerPolicy(Swap(1), boundary=Swap(1))),
    "disk": Treatment(LayerPolicy(Swap(3, "disk"), boundary=Swap(2, "disk"))),
    "boundary": Treatment(LayerPolicy(Recompute(), boundary=Swap(4))),
    "adapt steps": Treatment(adapt="steps"),
    "adapt loop": Treatment(adapt="loop"),
}

EVERY = tuple(TREATMENTS)
ADAPTED = ("adapt steps", "adapt loop")
APPLIED = tuple(name for name in EVERY if name not in ADAPTED)
RECOMPUTED = ("operators", "layers", "boundary")
SWAPPED = ("swap", "swap late", "disk")

"""The Plan: the Policy that was found, what it is predicted to do, and how far from the best it can be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from lowtide.planner.pipeline import Pipeline
from lowtide.planner.simulation import Simulation
from lowtide.planner.workload import Workload
from lowtide.policy import Decision, Policy
from lowtide.units import format_bytes, format_seconds

__all__ = ["UNBOUNDED", "Option", "Plan", "PlannedOperator"]

UNBOUNDED = 1 << 62
"""The budget where there is none: a device that does not say what it has."""


class PlannedOperator(NamedTuple):
    """What becomes of one operator's tensors in one layer."""

    name: str
    """Its dotted path inside the layer; ``input`` for the layer's input."""
    bytes: int
    """What it holds for backward in one micro-batch when it is kept."""
    decision: Decision


@dataclass(frozen=True, kw_only=True)
class Option:
    """One Policy that a plan was compared with: its memory and its time."""

    name: str
    """``keep everything``, ``recompute every layer``, ``swap and recompute``."""
    policy: Policy
    simulation: Simulation
    fits: bool
    how: str = ""
    """What to write to get it."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """The fastest Policy that fits a budget."""

    model: str
    device: str
    budget: int
    """Bytes of each device, compared with what the allocator reserves."""
    pipeline: Pipeline
    policy: Policy
    simulation: Simulation
    bound: float | None = None
    """No Policy that fits can be faster, as the simulator counts: seconds of a step. None where nothing fits."""
    feasible: bool = True
    """Whether it fits. If not, ``policy`` is the one that needs least."""
    least: int = 0
    """The smallest budget that some Policy fits without giving cached memory back, of those that were simulated. Where
    the plan does not fit, those that need least were."""
    options: tuple[Option, ...] = ()
    """The Policies that were compared, the plan's own included: keep everything, full recompute and so on."""
    curve: tuple[tuple[int, float], ...] = ()
    """The fastest step for each budget: bytes reserved and seconds."""
    yaml: str = ""
    """The Policy in the graph form of the guides; empty where it cannot be expressed there."""
    notes: tuple[str, ...] = ()
    """What was assumed, what was left out, and what a person should know."""
    solve_seconds: float = 0.0
    """How long the solver took, its import aside."""
    operators: tuple[tuple[PlannedOperator, ...], ...] = ()
    """For each layer, what becomes of its input and of every operator that holds something for backward; empty where
    it was not asked for."""
    workload: Workload = field(default_factory=Workload)
    """The batch, the layout and the types of numbers that it is for."""

    def __repr__(self) -> str:
        """One line: all of it would be pages."""
        verb = "fits" if self.feasible else "does not fit"
        budget = f" {verb} {format_bytes(self.budget)}" if self.bounded else ""
        found = f"{format_bytes(self.simulation.reserved)}, {format_seconds(self.simulation.seconds)} a step"
        return f"Plan({self.model} on {self.device}{budget}: {found}, Policy {self.policy.digest[:8]})"

    @property
    def bounded(self) -> bool:
        """Whether there is a budget."""
        return self.budget < UNBOUNDED

    @property
    def gap(self) -> float | None:
        """How much slower the simulated plan is than the bound, as a share of it; None where there is no bound."""
        return self.simulation.seconds / self.bound - 1 if self.bound else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of all devices in a second, or of one rank where the others are not known; None where no tokens
        are."""
        tokens = self.workload.tokens * self.pipeline.micro_batches * self.workload.data
        return tokens / self.simulation.seconds if tokens and self.simulation.seconds else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: the share of the device's peak that the model's own FLOPs are."""
        return self.workload.mfu(self.simulation.seconds)

"""What a simulated step shows: memory over time, spans on each lane, and what the peak is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

__all__ = ["Lane", "Moment", "Share", "Simulation", "Span", "StageSimulation"]

Lane: TypeAlias = Literal["compute", "link out", "link in", "communication"]


class Moment(NamedTuple):
    """The memory at one moment."""

    time: float
    """Seconds since the step began."""
    allocated: int
    """Bytes in use, as the allocator counts them."""
    layer: int | None
    """The layer that is running; None for what is outside the layers."""
    operator: str
    """The operator that is running."""


class Span(NamedTuple):
    """Something that a lane is busy with."""

    lane: Lane
    start: float
    seconds: float
    kind: Literal["forward", "backward", "recompute", "copy out", "copy back", "stall", "collective", "optimizer"]
    layer: int | None
    operator: str
    micro_batch: int = 0
    bytes: int = 0


class Share(NamedTuple):
    """A part of the peak."""

    what: str
    """``parameters``, ``gradients``, ``optimizer``, ``activations``, ``transients``, ``boundaries``."""
    layer: int | None
    operator: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class StageSimulation:
    """One pipeline stage's device."""

    stage: int
    peak: int
    """The most bytes in use, as the allocator counts them."""
    reserved: int
    """The most bytes that the allocator has taken from the device: what a budget is compared with."""
    static: int
    """Parameters, gradients, optimizer states."""
    seconds: float
    """Until its last action has ended, waiting for other stages included."""
    busy: float
    """Seconds of compute."""
    stall: float = 0.0
    """Seconds that compute waited for copies."""
    recompute: float = 0.0
    """Seconds of recompute."""
    optimizer: float = 0.0
    """Seconds of the optimizer's step."""
    moved: int = 0
    """Bytes copied out in a step."""
    host_peak: int = 0
    """The most bytes on the host at one time."""
    peak_at: Moment | None = None
    shares: tuple[Share, ...] = ()
    """What the peak is made of, the largest first."""
    memory: tuple[Moment, ...] = ()
    """Memory over time; left out where it was not asked for."""
    spans: tuple[Span, ...] = ()
    """What the lanes did; left out where it was not asked for."""
    requested: int = 0
    """The most bytes that tensors themselves had, without what an allocator adds: what a CPU's memory holds."""
    in_flight: int = 1
    """The most micro-batches whose activations are held at one time."""
    retries: int = 0
    """How often cached memory was given back to the device to make room, where it was simulated with a limit."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A step of all stages."""

    seconds: float
    """The step."""
    stages: tuple[StageSimulation, ...]
    bubble: float = 0.0
    """The share of the step that the busiest stage waits for others."""
    notes: tuple[str, ...] = field(default=())

    @property
    def peak(self) -> int:
        """The highest peak of a stage."""
        return max(stage.peak for stage in self.stages)

    @property
    def retries(self) -> int:
        """How often cached memory was given back, on the stage with most of it."""
        return max(stage.retries for stage in self.stages)

    @property
    def reserved(self) -> int:
        """The most that a stage reserves."""
        return max(stage.reserved for stage in self.stages)

"""What one optimizer step was: the value that monitors get."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["Monitor", "StepRecord"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One optimizer step of the whole job, the same on every rank."""

    step: int
    """The step, from 1."""
    steps: int
    """Steps of the whole run."""
    epoch: int
    """The pass over the data, from 1."""
    epochs: int
    """Passes over the data in the whole run."""
    step_in_epoch: int
    """The step within its epoch, from 1."""
    steps_in_epoch: int
    """Steps of one epoch."""
    loss: float
    """The mean loss over the step's samples, or tokens."""
    seconds: float
    """Wall time of the step."""
    learning_rate: float
    """The learning rate the step used."""
    overflow: bool
    """Whether a gradient was not finite, so that the optimizer was skipped."""
    loss_scale: float
    """The factor on the loss in this step; 1 without scaling."""
    global_norm: float | None
    """The norm of all gradients before clipping; None if not computed."""
    skipped: bool
    """Whether the optimizer was skipped, for an overflow or for a norm above the threshold."""
    tokens: int
    """Tokens of the step over all ranks."""
    samples: int
    """Samples consumed since the run began, over all ranks."""
    losses: dict[str, float] = field(default_factory=dict)
    """Parts of the loss by name: ``lm``, ``mtp``, ``auxiliary``."""
    drop_rates: dict[int, float] = field(default_factory=dict)
    """The share of routed slots beyond an expert's capacity, by layer."""
    peak_bytes: int | None = None
    """The device allocator's peak in this step; None on a CPU."""
    mfu: float | None = None
    """Model FLOPs utilisation; None where the device's peak or the model's FLOPs are not known."""

    evaluation_loss: float | None = None
    """The loss over the evaluation data after this step; None where none was due."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks in a second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class Monitor(Protocol):
    """Something that looks at each step."""

    def step(self, record: StepRecord) -> None:
        """Called after each step, on every rank the monitor was made on."""

    def close(self) -> None:
        """Called once at the end, also after an error."""

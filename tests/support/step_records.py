"""Steps as a run leaves them, for the tests of what looks at steps."""

from __future__ import annotations

from typing import Any

from lowtide.train.record import StepRecord

__all__ = ["record"]


def record(step: int = 1, **changes: Any) -> StepRecord:
    """A step of a run of 2 epochs with 10 steps each."""
    values: dict[str, Any] = {
        "step": step,
        "steps": 20,
        "epoch": (step - 1) // 10 + 1,
        "epochs": 2,
        "step_in_epoch": (step - 1) % 10 + 1,
        "steps_in_epoch": 10,
        "loss": 10.649 / step,
        "seconds": 0.25,
        "learning_rate": 1e-5,
        "overflow": False,
        "loss_scale": 1.0,
        "global_norm": 44.313248,
        "skipped": False,
        "tokens": 4096,
        "samples": 8 * step,
    }
    return StepRecord(**values | changes)

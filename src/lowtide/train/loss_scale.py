"""The factor on the loss that keeps float16 gradients from vanishing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowtide.config.schema.runner import LossScale

__all__ = ["Scale", "scale_of"]

LARGEST = 2.0**120
"""Where growth ends: the loss times the scale must stay a number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """A loss scale after some steps; each step gives the next one.

    >>> scale = Scale(value=8.0, window=2)
    >>> scale.after(overflow=True).value, scale.after(overflow=False).after(overflow=False).value
    (4.0, 16.0)
    """

    value: float = 1.0
    """The factor on the loss of the next step."""
    factor: float = 2.0
    """An overflow divides by it, and a window without overflow multiplies."""
    window: int | None = None
    """Steps without overflow after which the scale grows; None for a scale that never changes."""
    clean: int = 0
    """Steps without overflow since the scale last changed."""

    def after(self, *, overflow: bool) -> Scale:
        """The scale after a step."""
        if self.window is None:
            return self
        if overflow:
            return replace(self, value=max(self.value / self.factor, min(1.0, self.value)), clean=0)
        if self.clean + 1 < self.window:
            return replace(self, clean=self.clean + 1)
        return replace(self, value=min(self.value * self.factor, max(self.value, LARGEST)), clean=0)

    def state_dict(self) -> dict[str, float | int]:
        """What a checkpoint keeps; the settings are the file's."""
        return {"value": self.value, "clean": self.clean}

    def loaded(self, state: dict[str, float | int]) -> Scale:
        """The scale of a checkpoint under these settings; a fixed scale stays as the file has it."""
        if self.window is None:
            return self
        return replace(self, value=float(state["value"]), clean=int(state["clean"]))


def scale_of(settings: float | LossScale | None) -> Scale:
    """The scale that ``scale_sense`` asks for: a number is fixed, a mapping may adapt itself, nothing is 1."""
    if settings is None:
        return Scale()
    if isinstance(settings, (int, float)):
        return Scale(value=float(settings))
    window = settings.scale_window if settings.type == "DynamicLossScaleUpdateCell" else None
    return Scale(value=settings.loss_scale_value, factor=settings.scale_factor, window=window)

"""An optimizer's ``step``, after which somebody is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

__all__ = ["Stepped"]


class Stepped:
    """Stands in for an optimizer's ``step``.

    Not a hook: what begins and ends with a step has hooks of its own there, and they are being gone through.
    """

    def __init__(self, optimizer: Optimizer, ended: Callable[[], None]) -> None:
        self.optimizer, self.ended = optimizer, ended
        self.before = vars(optimizer).get("step")
        self.step = optimizer.step
        self.listening = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.step(*args, **kwargs)
        if self.listening:
            self.ended()
        return result

    def attach(self) -> None:
        """Take its place."""
        self.optimizer.step = self  # type: ignore[method-assign]

    def detach(self) -> None:
        """Put back what was there; where somebody has wrapped it meanwhile, only be silent."""
        self.listening = False
        if vars(self.optimizer).get("step") is self:
            del self.optimizer.step
            if self.before is not None:
                self.optimizer.step = self.before

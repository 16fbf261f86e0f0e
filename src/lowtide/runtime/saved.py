"""What autograd holds for backward in place of a tensor."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

__all__ = ["Saved", "unpack"]


class Saved(Protocol):
    """Something that stands for a tensor and can give it back."""

    def tensor(self) -> Tensor:
        """The tensor, bit by bit as it was saved. May be asked for several times, or never, on any thread."""


def unpack(saved: Tensor | Saved) -> Tensor:
    """Give autograd back what it saved."""
    return saved if isinstance(saved, Tensor) else saved.tensor()

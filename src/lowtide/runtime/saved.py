"""What autograd holds for backward in place of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from torch import Tensor

__all__ = ["Pack", "Saved", "unpack"]


class Saved(Protocol):
    """Something that stands for a tensor and can give it back."""

    def tensor(self) -> Tensor:
        """The tensor, bit by bit as it was saved. May be asked for several times, or never, on any thread."""


Pack: TypeAlias = "Callable[[Tensor], Tensor | Saved]"
"""What autograd asks for something to hold in place of a tensor."""


def unpack(saved: Tensor | Saved) -> Tensor:
    """Give autograd back what it saved."""
    return saved if isinstance(saved, Tensor) else saved.tensor()

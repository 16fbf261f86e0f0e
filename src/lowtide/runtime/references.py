"""What autograd holds in place of a tensor that a captured call produced. See [Note: rebuilding]."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.runtime.captured_call import CapturedCall
from lowtide.runtime.view import View

__all__ = ["Cast", "Inside", "Produced"]


class Produced(NamedTuple):
    """An output of a captured call, or a view of one."""

    call: CapturedCall
    output: int
    view: View | None
    """None for the output itself."""

    def recomputed(self) -> Tensor:
        """The tensor; the call keeps its results."""
        tensor = self.call.output(self.output)
        return tensor if self.view is None else self.view.of(tensor)

    def tensor(self) -> Tensor:
        """The tensor."""
        tensor = self.recomputed()
        self.call.release()
        return tensor


class Inside(NamedTuple):
    """A tensor that a captured call saved."""

    call: CapturedCall
    number: int
    """Its index among all that the call saved."""

    def tensor(self) -> Tensor:
        """The tensor."""
        tensor = self.call.inside(self.number)
        self.call.release()
        return tensor


class Cast(NamedTuple):
    """A cast of an output of a captured call."""

    source: Produced
    dtype: torch.dtype
    size: tuple[int, ...]

    def tensor(self) -> Tensor:
        """The cast, made again."""
        tensor = self.source.recomputed().to(self.dtype).view(self.size)
        self.source.call.release()
        return tensor

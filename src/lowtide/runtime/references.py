"""What autograd holds in place of a tensor that a captured call produced. See [Note: rebuilding]."""

from __future__ import annotations

from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

from lowtide.runtime.captured_call import CapturedCall
from lowtide.runtime.tensor_form import compare_form, form_of_tensor
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


class Inside:
    """A tensor that a captured call saved.

    Its call knows it by a weak reference, so that a replay keeps nothing for a part of the graph that is gone.
    """

    __slots__ = ("__weakref__", "call", "form", "recomputed")

    def __init__(self, call: CapturedCall, index: int, tensor: Tensor) -> None:
        """``index`` is that of ``tensor`` among all that the call saves."""
        self.call, self.form = call, form_of_tensor(tensor)
        self.recomputed: Tensor | None = None
        """Since the call was replayed, until it is unpacked."""
        call.want_inside(index, ref(self))

    def take(self, tensor: Tensor) -> None:
        """A replay has saved it again."""
        compare_form(tensor, self.form, self.call.line.whose)
        self.recomputed = tensor

    def tensor(self) -> Tensor:
        """The tensor."""
        if self.recomputed is None:
            self.call.replay()
        tensor, self.recomputed = self.recomputed, None
        assert tensor is not None
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

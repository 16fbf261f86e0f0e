"""How a tensor sees a storage, so that another storage with the same bytes can be seen alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide._torch_private.subclasses import Subclass, inner_tensor, landed_tensor, subclass_wrapper
from lowtide._torch_private.views import negated_view
from lowtide.operators.saved import Saved

__all__ = ["SavedParts", "View", "as_stored"]


def as_stored(tensor: Tensor) -> Tensor:
    """A tensor as its storage has the numbers: neither seen as their conjugates nor with the other sign."""
    if tensor.is_conj():
        tensor = tensor.conj()
    return negated_view(tensor) if tensor.is_neg() else tensor


class View(NamedTuple):
    """A tensor's layout in its storage."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    wrap: Callable[[Tensor], Tensor] | None
    """Makes a tensor subclass, such as a DTensor, of the plain tensor; None where it was plain."""
    conjugate: bool
    negative: bool
    """Whether the numbers are seen as their conjugates, and with the other sign: torch does both lazily."""

    @staticmethod
    def by(tensor: Tensor) -> View:
        """How ``tensor`` sees its storage. A view of a subclass is one of the plain tensor that it holds."""
        wrap = subclass_wrapper(tensor)
        plain = tensor if wrap is None else inner_tensor(tensor)
        offset = int(plain.storage_offset())
        return View(plain.shape, plain.stride(), offset, plain.dtype, wrap, plain.is_conj(), plain.is_neg())

    def of(self, tensor: Tensor) -> Tensor:
        """The same view of another tensor's storage."""
        whole = as_stored(landed_tensor(tensor))
        if whole.dtype is self.dtype:
            part = whole.as_strided(self.shape, self.stride, self.offset)
        else:  # real numbers seen as complex, or the reverse
            empty = torch.empty(0, dtype=self.dtype, device=whole.device)
            part = empty.set_(whole.untyped_storage(), self.offset, self.shape, self.stride)
        if self.conjugate:
            part = part.conj()
        if self.negative:
            part = negated_view(part)
        return part if self.wrap is None else self.wrap(part)


class SavedParts:
    """A tensor subclass, such as a DTensor, whose plain tensors are saved one by one."""

    __slots__ = ("parts", "subclass")

    def __init__(self, subclass: Subclass, parts: Mapping[str, Saved]) -> None:
        self.subclass, self.parts = subclass._replace(tensors={}), parts

    def tensor(self) -> Tensor:
        """The subclass, put together again."""
        return self.subclass.rebuilt({name: part.tensor() for name, part in self.parts.items()})

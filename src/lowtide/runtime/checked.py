"""Check while it runs: each tensor comes back with the bytes it left with, and is still whose it was when learnt."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lowtide._torch_private.subclasses import inner_tensor
from lowtide.errors import VerificationError
from lowtide.operators.calls import CallTracker
from lowtide.operators.kept import Kept
from lowtide.operators.kinds import LayerKind
from lowtide.operators.observe import Watcher
from lowtide.runtime.saved import Saved, unpack

if TYPE_CHECKING:
    from lowtide.runtime.run import Run

__all__ = ["LayerCheck", "bits", "checked", "checksum"]


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's values, on this rank and on the host. Waits for the device."""
    return inner_tensor(tensor).detach().contiguous().cpu().reshape(-1).view(torch.uint8)


def checksum(tensor: Tensor) -> int:
    """A checksum of them."""
    return zlib.crc32(bits(tensor).numpy().data)


class _Checked:
    """A saved tensor that proves itself when it comes back."""

    __slots__ = ("checksum", "saved", "what")

    def __init__(self, saved: Saved, tensor: Tensor, what: str) -> None:
        self.saved, self.what = saved, what
        self.checksum = checksum(tensor)

    def tensor(self) -> Tensor:
        tensor = unpack(self.saved)
        if checksum(tensor) != self.checksum:
            raise VerificationError(f"{self.what} came back with other bytes than it left with")
        return tensor


def checked(saved: Tensor | Saved, tensor: Tensor, number: int, where: str) -> Tensor | Saved:
    """What is saved in place of a tensor, so that it proves itself when it comes back."""
    if isinstance(saved, Tensor | Kept):
        return saved  # it stays
    return _Checked(saved, tensor, f"tensor {number} of {where}, of shape {tuple(tensor.shape)},")


class LayerCheck:
    """Watches a layer in every step, and compares with what was learnt."""

    def __init__(self, index: int, layer: nn.Module, kind: LayerKind) -> None:
        self.index, self.kind = index, kind
        self.watcher = Watcher(layer)
        self.tracker = CallTracker(layer, self.watcher)

    def packing(self, run: Run) -> Callable[[Tensor], Tensor | Saved]:
        """What to save in place of a tensor, checked."""

        def pack(tensor: Tensor) -> Tensor | Saved:
            number = run.number
            saved = run.pack(tensor)
            self.watcher.pack(tensor)
            if number < len(self.kind.packs):
                learnt, seen = self.kind.packs[number], self.watcher.packs[-1]
                run.changed |= (learnt.source, learnt.owner) != (seen.source, seen.owner)
            return checked(saved, tensor, number, f"layer {self.index}")

        return pack

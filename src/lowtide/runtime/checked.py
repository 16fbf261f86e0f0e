"""Check while it runs: each tensor is reloaded or recomputed bitwise, and has the owner that its profile says."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lowtide._torch_private.subclasses import inner_tensor
from lowtide.errors import VerificationError
from lowtide.operators.calls import CallTracker
from lowtide.operators.kinds import LayerKind
from lowtide.operators.profiler import Profiler
from lowtide.operators.saved import Kept, PackHook, Saved

if TYPE_CHECKING:
    from lowtide.runtime.run import Run

__all__ = ["LayerCheck", "bits", "checksum"]


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's values, on this rank and on the host. Waits for the device."""
    return inner_tensor(tensor).detach().contiguous().cpu().reshape(-1).view(torch.uint8)


def checksum(tensor: Tensor) -> int:
    """A checksum of them."""
    return zlib.crc32(bits(tensor).numpy().data)


class _Checked:
    """A saved tensor that proves itself when it is unpacked."""

    __slots__ = ("checksum", "saved", "what")

    def __init__(self, saved: Saved, tensor: Tensor, what: str) -> None:
        self.saved, self.what = saved, what
        self.checksum = checksum(tensor)

    def tensor(self) -> Tensor:
        """The tensor; VerificationError if its bytes are not those that were saved."""
        tensor = self.saved.tensor()
        if checksum(tensor) != self.checksum:
            raise VerificationError(f"{self.what} was unpacked with other bytes than were saved")
        return tensor


class LayerCheck:
    """Profiles a layer in every step, and compares with its profile."""

    def __init__(self, index: int, layer: nn.Module, kind: LayerKind) -> None:
        self.index, self.kind = index, kind
        self.profiler = Profiler(layer)
        self.tracker = CallTracker(layer, self.profiler)

    def packing(self, run: Run) -> PackHook:
        """As the run's own pack hook, with proof that what is unpacked is what was saved."""

        def pack(tensor: Tensor) -> Saved:
            number = run.number
            saved = run.pack(tensor)
            self.profiler.pack(tensor)
            if number < len(self.kind.packs):
                expected, seen = self.kind.packs[number], self.profiler.packs[-1]
                run.changed |= (expected.source, expected.owner) != (seen.source, seen.owner)
            if isinstance(saved, Kept):
                return saved
            return _Checked(saved, tensor, f"tensor {number} of layer {self.index}, of shape {tuple(tensor.shape)},")

        return pack

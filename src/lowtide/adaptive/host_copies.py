"""Offload everything that autograd saves while a step is profiled: the least that a step needs of the device.

Slow, and for profiling only: each copy is waited for. Parameters are kept: they are on the device in any case.

[Note: saved before filled]
An operator saves what it was given before its kernel runs, and some kernels then write into it without a new version:
the noise of an RReLU is saved empty. Writes through ``.data`` do the same. Where kernels are seen, their writes are
reported here, and what was written without a new version is copied again. Where they are not, what is not the
operator's own output stays on the device until another operator saves something: each has a node of its own in
autograd's graph.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lowtide._torch_private.modes import DisableTorchFunction
from lowtide._torch_private.nodes import is_own_output, node_number
from lowtide._torch_private.subclasses import inner_tensor
from lowtide.adaptive.counts import Counts
from lowtide.adaptive.offload import OffloadableStorage, SavedStorages
from lowtide.operators.saved import Saved

__all__ = ["HostCopies"]


class HostCopies:
    """Offloads what is saved, immediately if ``at_once``: then kernels' writes are reported to :meth:`written`."""

    def __init__(self, *, at_once: bool) -> None:
        self.at_once = at_once
        self.latest: list[OffloadableStorage] = []
        """What the operator that is running has saved. See [Note: saved before filled]."""
        self.storages = SavedStorages(0, Counts(), profiling=True, kept=self.latest.append)
        self.node = -1
        """The number of its node."""

    def hold(self, tensor: Tensor) -> Saved:
        """The pack hook."""
        node = node_number()
        with DisableTorchFunction(), torch.no_grad():
            if node != self.node:
                self.node = node
                self._offload(0)
            before = len(self.latest)
            saved = self.storages.pack(tensor)
            if self.at_once or is_own_output(tensor):
                self._offload(before)
            return saved

    def _offload(self, first: int) -> None:
        """Offload what was saved, from the ``first`` on."""
        for storage in self.latest[first:]:
            storage.offload()
        del self.latest[first:]

    def written(self, tensors: Iterable[Tensor]) -> None:
        """A kernel has written into these."""
        for tensor in tensors if self.storages.known else ():
            plain = inner_tensor(tensor)
            found = self.storages.find(plain) if plain.layout is torch.strided else None
            if found is not None:
                found.renew(plain)

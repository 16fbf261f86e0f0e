"""Send parameters, gradients and optimizer states to the host while an operator needs their memory.

[Note: paging]
What an optimizer works on is not saved for backward: it is there for good, and held by many. So its storages leave
under the tensors that see them: the bytes are copied to the host and the storage is resized to nothing, as FSDP does
with gathered parameters. Until it is back no operator may read it, so the dispatch mode, which sees the arguments of
every operator, brings them in first, and stays on as long as anything is away.

While the optimizer steps, whatever the running operator does not touch may leave, what the optimizer made on its way
included. In forward and backward optimizer states may, and gradients that are done. Parameters may not: a kernel that
is not torch's reads them without asking.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide._torch_private.modes import unseen_by_modes
from lowtide._torch_private.storages import storage_key
from lowtide._torch_private.subclasses import inner_tensor
from lowtide.adaptive.counts import Counts
from lowtide.adaptive.offload import bytes_of
from lowtide.operators.calls import tensors_of
from lowtide.out_of_memory import is_out_of_memory

__all__ = ["Pager", "touched_by"]


_resize: Callable[[Any, int], Any] = torch.UntypedStorage.resize_
"""As torch has it: while the mode is on, others' resizing is watched."""


class _Paged(NamedTuple):
    """A storage that is on the host."""

    storage: Any
    device: torch.device
    host: Tensor


class Pager:
    """What of the optimizers is on the host."""

    def __init__(
        self, optimizers: Iterable[torch.optim.Optimizer], smallest: int, lock: threading.RLock, counts: Counts
    ) -> None:
        self.optimizers, self.counts = tuple(optimizers), counts
        self.lock = lock
        """That of the saved storages: either may have to make room in the other."""
        self.smallest = smallest
        self.away: dict[int, _Paged] = {}
        """By storage."""
        self.stepping: torch.optim.Optimizer | None = None
        """The optimizer whose step runs."""
        self.made: list[weakref.ReferenceType[Tensor]] = []
        """What it made on its way."""

    def page_out(self, wanted: float, touched: set[int]) -> int:
        """Send storages other than those ``touched`` to the host until so many bytes are free; how many are."""
        freed = 0
        with self.lock:
            for tensor in self._movable():
                if freed >= wanted:
                    break
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key in touched or key in self.away or size < self.smallest or not storage.resizable():
                    continue
                if not freed:
                    torch.accelerator.synchronize()
                self.away[key] = _Paged(storage, tensor.device, bytes_of(storage, tensor.device).cpu())
                _resize(storage, 0)
                freed += size
            self.counts.paged_bytes += freed
        return freed

    def page_in(self, touched: set[int], make_room: Callable[[float, set[int]], int]) -> None:
        """Bring back what is about to be read. Where there is no room for it, others leave."""
        with self.lock:
            for key in touched & self.away.keys():
                paged = self.away[key]
                while True:
                    try:
                        _resize(paged.storage, paged.host.nbytes)
                        break
                    except RuntimeError as error:
                        if not is_out_of_memory(error) or not make_room(paged.host.nbytes, touched):
                            raise
                with unseen_by_modes():  # ours would look for it among what is away
                    bytes_of(paged.storage, paged.device).copy_(paged.host)
                del self.away[key]  # only now: an interrupt before this must not lose the bytes

    def page_in_all(self) -> bool:
        """Bring back everything for which there is room; whether that is everything."""
        for key in list(self.away):
            try:
                self.page_in({key}, lambda wanted, touched: 0)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
        return not self.away

    def compact(self) -> None:
        """Lay optimizer states and gradients side by side, between two steps.

        They were made when a step had left its activations' segments with holes, and keep those segments for good. A
        plan counts them as if they had been there first.
        """
        counted = self.counts.paged_bytes
        self.page_out(float("inf"), set())
        torch.accelerator.empty_cache()
        self.page_in_all()
        self.counts.paged_bytes = counted

    def note(self, result: Any) -> None:
        """The optimizer that steps has made something."""
        self.made += [weakref.ref(tensor) for tensor in tensors_of(result)]

    def _movable(self) -> Iterator[Tensor]:
        """Plain tensors of the device that may leave now."""
        for tensor in self._known():
            plain = inner_tensor(tensor)
            if not plain.is_cpu and not plain.is_meta and plain.layout is torch.strided:
                yield plain

    def _known(self) -> Iterator[Tensor]:
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                yield from tensors_of(state if isinstance(state, dict) else ())
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from (one.grad for one in group["params"] if one.grad is not None)
        if self.stepping is not None:
            for group in self.stepping.param_groups:
                yield from group["params"]
            yield from (tensor for reference in self.made if (tensor := reference()) is not None)


def touched_by(arguments: Any) -> set[int]:
    """The storages of the tensors among an operator's arguments."""
    return {storage_key(tensor) for tensor in tensors_of(arguments) if tensor.layout is torch.strided}

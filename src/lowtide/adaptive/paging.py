"""Page parameters, gradients and optimizer states out to the host while an operator needs their memory.

[Note: paging]
What an optimizer works on is not saved for backward: it lives through the whole run, and much code holds it. So a
storage is paged out under the tensors that see it: its bytes are copied to the host and it is resized to nothing, as
FSDP does with gathered parameters. No operator may read it until it is paged in, so the dispatch mode, which sees the
arguments of every operator, pages them in first, and stays on as long as anything is paged out.

While the optimizer steps, everything that the running operator does not touch may be paged out, including what the
optimizer's step has made so far. In forward and backward optimizer states may, and finished gradients. Parameters may
not: kernels that are not torch's read them unseen.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowtide._torch_private.modes import unseen_by_modes
from lowtide._torch_private.storages import storage_address, storage_key
from lowtide._torch_private.subclasses import inner_tensor
from lowtide.adaptive.counts import Counts
from lowtide.adaptive.offload import bytes_of
from lowtide.operators.calls import tensors_of
from lowtide.out_of_memory import is_out_of_memory
from lowtide.units import format_bytes

__all__ = ["Pager", "touched_by"]


_resize: Callable[[Any, int], Any] = torch.UntypedStorage.resize_
"""Torch's own: while the mode is on, resizing by other code is intercepted."""


class _Paged(NamedTuple):
    """A storage that is paged out, and its bytes on the host."""

    storage: Any
    device: torch.device
    host: Tensor


class Pager:
    """Pages out what the optimizers work on. See [Note: paging]."""

    def __init__(
        self, optimizers: Iterable[torch.optim.Optimizer], smallest: int, lock: threading.RLock, counts: Counts
    ) -> None:
        self.optimizers, self.counts = tuple(optimizers), counts
        self.lock = lock
        """The saved storages' lock: each of the two may have to make room by the other."""
        self.smallest = smallest
        self.paged_out: dict[int, _Paged] = {}
        """By the storage's key."""
        self.stepping: torch.optim.Optimizer | None = None
        """The optimizer whose step runs."""
        self.made: list[weakref.ReferenceType[Tensor]] = []
        """What its step has made so far."""

    def page_out(self, wanted: float, touched: set[int]) -> int:
        """Page out storages other than ``touched`` until so many bytes are freed; how many were."""
        freed = 0
        with self.lock:
            for tensor in self._movable():
                if freed >= wanted:
                    break
                storage = tensor.untyped_storage()
                key, size = storage_address(storage), storage.nbytes()
                if key in touched or key in self.paged_out or size < self.smallest or not storage.resizable():
                    continue
                if not freed:
                    torch.accelerator.synchronize()
                self.paged_out[key] = _Paged(storage, tensor.device, bytes_of(storage, tensor.device).cpu())
                _resize(storage, 0)
                freed += size
            self.counts.paged_bytes += freed
        return freed

    def page_in(self, touched: set[int], make_room: Callable[[float, set[int]], int]) -> None:
        """Page in what is about to be read. Where there is no room for it, ``make_room`` offloads other tensors."""
        with self.lock:
            for key in touched & self.paged_out.keys():
                paged = self.paged_out[key]
                while True:
                    try:
                        _resize(paged.storage, paged.host.nbytes)
                        break
                    except RuntimeError as error:
                        if not is_out_of_memory(error) or not make_room(paged.host.nbytes, touched):
                            raise
                with unseen_by_modes():  # our mode would try to page it in
                    bytes_of(paged.storage, paged.device).copy_(paged.host)
                del self.paged_out[key]  # only now: an interrupt before this must not lose the bytes

    def page_in_all(self) -> bool:
        """Page in everything for which there is room; whether that was everything."""
        for key in list(self.paged_out):
            try:
                self.page_in({key}, lambda wanted, touched: 0)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
        return not self.paged_out

    def compact(self) -> None:
        """Lay out optimizer states and gradients contiguously, between two steps.

        They were allocated in holes of segments that a step's activations had left, and keep these segments reserved. A
        plan assumes that they were allocated first.
        """
        counted = self.counts.paged_bytes
        self.page_out(float("inf"), set())
        torch.accelerator.empty_cache()
        self.page_in_all()
        self.counts.paged_bytes = counted

    def note(self, result: Any) -> None:
        """The stepping optimizer has made these tensors."""
        self.made += [weakref.ref(tensor) for tensor in tensors_of(result)]

    def stranded(self, model: nn.Module) -> str:
        """An error message about what is paged out and has no room on the device."""
        size = format_bytes(sum(one.host.nbytes for one in self.paged_out.values()))
        names = [name for name, one in model.named_parameters() if storage_key(one) in self.paged_out]
        some = f", among them {', '.join(names[:3])}{', …' if len(names) > 3 else ''}," if names else ""
        return (
            f"{len(self.paged_out)} parameters, gradients or optimizer states ({size}){some} are on the host, and there"
            " is no room on the device to page them in"
        )

    def _movable(self) -> Iterator[Tensor]:
        """Plain tensors on the device that may be paged out now."""
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

"""One imagined device: its memory and its clocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias

from lowtide.cost.device import Device
from lowtide.cost.kernel import kernel_seconds
from lowtide.planner.allocator import Allocator, Block, Limit
from lowtide.planner.cache import Cache
from lowtide.planner.expandable import ExpandableAllocator
from lowtide.planner.lanes import Lanes
from lowtide.planner.simulation import Lane, Moment, Span
from lowtide.trace.layout import group_channel
from lowtide.trace.trace import READ_BY_HOST, Kernel, Part

__all__ = ["Phase", "Rank", "Storage", "Timed"]

Phase: TypeAlias = Literal["forward", "backward", "recompute", "optimizer"]

WAITING = frozenset(
    (
        *(f"aten::{name}" for name in ("_local_scalar_dense", "item", "nonzero", "masked_select", "_unique2", "equal")),
        READ_BY_HOST,
    )
)
"""Kernels whose result the host waits for."""


class Storage:
    """Memory and who holds it. See [Note: holding] in :mod:`lowtide.planner.replay`."""

    __slots__ = ("block", "count", "layer", "operator", "size", "what")

    def __init__(self, block: Block | None, size: int) -> None:
        self.block, self.size = block, size
        self.count = 1
        self.what, self.operator = "transients", ""
        self.layer: int | None = None

    def is_saved(self, operator: str) -> None:
        """It is more than passing: backward needs what ``operator`` made."""
        if self.what == "transients":
            self.what, self.operator = "activations", operator or self.operator


class Timed(NamedTuple):
    """A kernel's seconds, and on which clocks they pass."""

    seconds: float
    waits: bool = False
    """Whether the host waits for it."""
    stream: int = 0
    group: str = ""
    """For a collective, its group: one of its collectives runs after the other."""
    waited: bool = True
    """For a collective, whether its stream waits for it at once."""


_timings: Cache[tuple[Part, Device, tuple[Timed, ...]]] = Cache(1024)
"""By the identity of a part and a device, which are held so that it stays theirs."""


class Rank:
    """A device: its memory, its clocks, and, where details are asked for, what happened when."""

    def __init__(self, device: Device, *, details: bool = False, stop_at: int = -1, limit: Limit | None = None) -> None:
        self.device = device
        self.allocator = ExpandableAllocator(limit) if device.expandable_segments else Allocator(limit)
        self.retries = 0
        """How often cached memory was given back to the device so far."""
        self.lanes = Lanes(device)
        self.bytes = self.most_bytes = 0
        """The tensors' own bytes, and the most of them."""
        self.recompute = 0.0
        """Seconds of recompute."""
        self.where: tuple[int | None, str, int, Phase] = (None, "", 0, "forward")
        """What is running: the layer, the operator, the micro-batch, the phase."""
        self.spans: list[Span] | None = [] if details else None
        self.moments: list[Moment] | None = [] if details else None
        self.live: dict[Storage, None] | None = {} if details else None
        self.peak_at: Moment | None = None
        self.peak_allocation = self.allocations = 0
        self.stop_at = stop_at
        """The allocation at which the live storages are written down."""
        self.snapshot: list[Storage] = []

    # Memory.

    def make(self, size: int) -> Storage:
        """Allocate."""
        allocator = self.allocator
        before = allocator.peak
        storage = Storage(allocator.allocate(size), size)
        if allocator.retries > self.retries:
            self.retries = allocator.retries
            self.lanes.drain()  # the device takes memory back when it has done all that it was given
        self.bytes += size
        if self.bytes > self.most_bytes:
            self.most_bytes = self.bytes
        self.allocations += 1
        highest = allocator.peak > before
        if highest:
            self.peak_allocation = self.allocations
        if self.live is not None:
            self._look(storage, highest)
        return storage

    def drop(self, storage: Storage) -> None:
        """One holder less; with the last one the memory is free."""
        storage.count -= 1
        if storage.count == 0:
            assert storage.block is not None
            self.allocator.release(storage.block)
            self.bytes -= storage.size
            storage.block = None
            if self.live is not None:
                del self.live[storage]
                self._sample()

    def _look(self, storage: Storage, highest: bool) -> None:
        assert self.live is not None
        storage.layer, storage.operator = self.where[0], self.where[1]
        self.live[storage] = None
        moment = self._sample()
        if highest:
            self.peak_at = moment
        if self.allocations == self.stop_at:
            self.snapshot = [_copy(one) for one in self.live]

    def _sample(self) -> Moment:
        assert self.moments is not None
        now = max(self.lanes.computation, self.lanes.host)
        moment = Moment(now, self.allocator.allocated, self.where[0], self.where[1])
        self.moments.append(moment)
        return moment

    def drop_all(self, storages: Iterable[Storage]) -> None:
        """One holder less of each."""
        for storage in list(storages):
            self.drop(storage)

    # Time.

    def timed(self, part: Part) -> tuple[Timed, ...]:
        """The seconds of a part's kernels."""
        device = self.device
        timed = _timings.get(
            (id(part), id(device)), lambda: (part, device, tuple(_timed_kernel(device, one) for one in part.kernels))
        )
        return timed[2]

    def run(self, kernel: Timed) -> None:
        """Issue a kernel."""
        start = self.lanes.run(kernel)
        if kernel.waits:
            self.lanes.synchronize()
        if self.spans is not None:
            layer, operator, micro_batch, phase = self.where
            kind: Literal["forward", "backward", "recompute", "optimizer", "collective"]
            lane: Lane = "compute" if kernel.stream == 0 and kernel.waited else "communication"
            kind = "collective" if kernel.group or lane == "communication" else phase
            self.spans.append(Span(lane, start, kernel.seconds, kind, layer, operator, micro_batch))

    def run_again(self, kernel: Timed) -> None:
        """Issue a kernel that recomputes what forward did."""
        layer, operator, micro_batch, phase = self.where
        self.where = (layer, operator, micro_batch, "recompute")
        self.run(kernel)
        if kernel.stream == 0:
            self.recompute += kernel.seconds
        self.where = (layer, operator, micro_batch, phase)

    def wait(self, until: float, layer: int | None, operator: str, micro_batch: int) -> None:
        """The computation waits for a copy of what ``operator`` made."""
        begin = max(self.lanes.computation, self.lanes.host)
        waited = self.lanes.wait(until)
        if waited > 0 and self.spans is not None:
            self.spans.append(Span("compute", begin, waited, "stall", layer, operator, micro_batch))


def _timed_kernel(device: Device, kernel: Kernel) -> Timed:
    group = group_channel(kernel.ranks, kernel.stride) if kernel.ranks > 1 else ""
    seconds = kernel_seconds(device, kernel)
    return Timed(seconds, kernel.kind in WAITING, kernel.stream, group, kernel.waited)


def _copy(storage: Storage) -> Storage:
    copy = Storage(None, storage.size)
    copy.what, copy.layer, copy.operator, copy.count = storage.what, storage.layer, storage.operator, storage.count
    return copy

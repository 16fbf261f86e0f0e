"""What can go wrong with a swap, and what then happens: each fault is made to happen, for real where that is possible.

``python tests/support/fault_cases.py`` writes the table of the documentation, ``docs/faults.md``.
"""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor

import tide
from lowtide.errors import SwapError
from lowtide.policy import LayerPolicy, Policy
from lowtide.runtime.apply import Handle, apply
from lowtide.runtime.limits import Limits
from lowtide.runtime.link import Link
from lowtide.runtime.swapped import Swapped
from support.stacks import ROWS, WIDTH, Stack, gated, lines, step

__all__ = ["FAULTS", "Fault", "Session", "as_markdown"]

LAYERS, STEPS, FAULTY = 3, 5, 2
"""The fault happens in step 2; the two before it are as any other."""


class Interruption(Exception):  # noqa: N818
    """Raised by a model or a hook of the user's."""


class Session:
    """A model in training."""

    def __init__(self, policy: LayerPolicy | None, device: str, directory: Path, limits: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.device = device
        self.interrupted = ""
        self.model = Stack(self._body, LAYERS).to(device)
        self.handle: Handle | None = None
        if policy is not None:
            settings = Limits(**{"minimum_bytes": 1, "disk_directory": str(directory), **limits})
            self.handle = apply(self.model, Policy((policy,) * LAYERS, origin="solver"), limits=settings)
        self.batches = [torch.randn(ROWS, WIDTH).to(device) for _ in range(STEPS)]
        self.before_backward: Callable[[], None] = lambda: None

    def _body(self, layer: Any, x: Tensor) -> Tensor:
        output = gated(layer, x)
        if layer is self.model.layers[1] and self.interrupted == "forward":
            raise Interruption
        if layer is self.model.layers[1] and self.interrupted == "backward":
            output.register_hook(_interrupt)
        return output

    def step(self, number: int) -> list[Tensor]:
        def backward(loss: Tensor) -> None:
            self.before_backward()
            loss.backward()

        return step(self.model, self.batches[number], backward)

    @property
    def attached(self) -> Handle:
        assert self.handle is not None
        return self.handle

    @property
    def notes(self) -> set[str]:
        """What the receipt says."""
        return {note for line in lines(self.attached) for note in line.notes}

    def written(self) -> Any:
        """The disk's file, when all that was to be written is."""
        disk = self.attached.manager.disk
        for _ in range(1000):
            if not disk.tasks.qsize():
                break
            time.sleep(0.002)
        for _ in range(2):  # two threads: what was taken from the queue is done when two more are
            disk.submit(time.sleep, 0.02)
        disk.submit(time.sleep, 0.0).wait()
        return disk


def _interrupt(gradient: Tensor) -> None:
    raise Interruption


Arm: TypeAlias = Callable[[Session], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, and what happens then."""

    fault: str
    happens: Literal["goes on", "stops"]
    """Goes on: loss and gradients are bitwise those of the run without lowtide. Stops: an exception of that class;
    what was held is freed, and the same step, retried without the fault, is bitwise the same."""
    seen: str
    """What the receipt notes, or what is raised."""
    arm: Arm
    """Makes it happen, for one step."""
    error: type[BaseException] | None = None
    message: str = ""
    tier: Literal["host", "disk"] = "host"
    device: str = "tide"
    prefetch: int = 2
    limits: dict[str, Any] = field(default_factory=dict)
    first: bool = False
    """Whether it is there from the first step on."""

    @property
    def name(self) -> str:
        return f"{self.fault}, {self.tier}, {self.device}"


# Faults of the device


def always(arm: Callable[[], None]) -> Arm:
    """A fault of the device, there from the beginning of the step."""

    @contextmanager
    def armed(session: Session) -> Iterator[None]:
        arm()
        yield
        tide.faults.disarm()

    return armed


def in_backward(arm: Callable[[], None]) -> Arm:
    """A fault of the device, from the beginning of backward."""

    @contextmanager
    def armed(session: Session) -> Iterator[None]:
        session.before_backward = arm
        try:
            yield
        finally:
            session.before_backward = lambda: None
            tide.faults.disarm()

    return armed


@contextmanager
def every_copy_back_fails(session: Session) -> Iterator[None]:
    real = Link.reload

    def failing(*args: Any) -> Any:
        tide.faults.fail_copy(1)
        return real(*args)

    with patch.object(Link, "reload", failing):
        try:
            yield
        finally:
            tide.faults.disarm()


@contextmanager
def no_memory_ahead(session: Session) -> Iterator[None]:
    real = Swapped.prefetch

    def failing(swapped: Swapped) -> None:
        tide.faults.fail_allocation(1)
        real(swapped)
        tide.faults.disarm()

    with patch.object(Swapped, "prefetch", failing):
        yield


@contextmanager
def no_memory_at_use(session: Session) -> Iterator[None]:
    real = Swapped._reload

    def failing(swapped: Swapped) -> None:
        tide.faults.fail_allocation(1)
        real(swapped)

    with patch.object(Swapped, "_reload", failing):
        try:
            yield
        finally:
            tide.faults.disarm()


def slow_link(session: Session) -> AbstractContextManager[None]:
    tide.configure(device_to_host_bandwidth=10**5, host_to_device_bandwidth=10**5)
    return nullcontext()


# Faults of the disk, by its descriptors


@contextmanager
def replaced(session: Session, path: str, flags: int) -> Iterator[None]:
    """The disk's file is, for a while, something else of the kernel's."""
    disk = session.written()
    handles = {disk.buffered, disk.direct}
    spare = {handle: os.dup(handle) for handle in handles}
    other = os.open(path, flags)
    for handle in handles:
        os.dup2(other, handle)
    try:
        yield
    finally:
        session.written()
        for handle, real in spare.items():
            os.dup2(real, handle)
            os.close(real)
        os.close(other)


def full_disk(session: Session) -> AbstractContextManager[None]:
    return replaced(session, "/dev/full", os.O_RDWR)


def between(change: Callable[[Session], Any]) -> Arm:
    """Something that happens to the disk between forward and backward."""

    @contextmanager
    def armed(session: Session) -> Iterator[None]:
        opened: list[Any] = []

        def act() -> None:
            result = change(session)
            if result is not None:
                result.__enter__()
                opened.append(result)

        session.before_backward = act
        try:
            yield
        finally:
            session.before_backward = lambda: None
            for one in opened:
                one.__exit__(None, None, None)

    return armed


def unreadable(session: Session) -> AbstractContextManager[None]:
    return replaced(session, "/proc/self/mem", os.O_RDWR)  # reading its beginning is an input/output error


def corrupted(session: Session) -> None:
    disk = session.written()
    for offset in range(0, disk.end, 4096):
        (byte,) = os.pread(disk.buffered, 1, offset + 100)
        os.pwrite(disk.buffered, bytes([byte ^ 1]), offset + 100)


def truncated(session: Session) -> None:
    disk = session.written()
    os.ftruncate(disk.buffered, 0)


def zeroed(session: Session) -> None:
    disk = session.written()
    os.ftruncate(disk.buffered, 0)
    os.ftruncate(disk.buffered, disk.end)


@contextmanager
def no_growth(session: Session) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
        session.written()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# Faults of the program


def interrupted(where: str) -> Arm:
    @contextmanager
    def armed(session: Session) -> Iterator[None]:
        session.interrupted = where
        try:
            yield
        finally:
            session.interrupted = ""

    return armed


def nothing(session: Session) -> AbstractContextManager[None]:
    return nullcontext()


FAULTS = (
    Fault("an offload fails", "goes on", "the offload failed", always(lambda: tide.faults.fail_copy(1))),
    Fault("an offload fails", "goes on", "the offload failed", always(lambda: tide.faults.fail_copy(1)), tier="disk"),
    Fault(
        "a reload fails once, ahead of its use", "goes on", "the prefetch could not start",
        in_backward(lambda: tide.faults.fail_copy(1)),
    ),
    Fault(
        "a reload fails once, at its use", "goes on", "a reload failed and was tried again",
        in_backward(lambda: tide.faults.fail_copy(1)), limits={"in_flight_bytes": 0},
    ),
    Fault(
        "a reload fails once", "goes on", "a reload failed and was tried again",
        in_backward(lambda: tide.faults.fail_copy(1)), tier="disk",
    ),
    Fault("a reload fails always", "stops", "SwapError", every_copy_back_fails, SwapError, "twice"),
    Fault("a reload fails always", "stops", "SwapError", every_copy_back_fails, SwapError, "twice", tier="disk"),
    Fault("the link is a thousand times slower", "goes on", "", slow_link),
    Fault("the link is a thousand times slower", "goes on", "", slow_link, tier="disk"),
    Fault("a copy takes a second longer", "goes on", "", always(lambda: tide.faults.delay_copy(2, 10**9))),
    Fault("a copy back takes a second longer", "goes on", "", in_backward(lambda: tide.faults.delay_copy(1, 10**9))),
    Fault("a copy overtakes another", "goes on", "", always(lambda: tide.faults.reorder_copy(1))),
    Fault(
        "no device memory when a copy back starts ahead", "goes on", "the prefetch could not start",
        no_memory_ahead,
    ),
    Fault(
        "no device memory when a copy back starts at its use", "stops", "torch.OutOfMemoryError", no_memory_at_use,
        torch.OutOfMemoryError, limits={"in_flight_bytes": 0},
    ),
    Fault(
        "no device memory when a copy back starts at its use", "stops", "torch.OutOfMemoryError", no_memory_at_use,
        torch.OutOfMemoryError, limits={"in_flight_bytes": 0}, tier="disk",
    ),
    Fault(
        "the device is full in backward", "stops", "torch.OutOfMemoryError",
        in_backward(lambda: tide.faults.shrink_capacity(1, 0)), torch.OutOfMemoryError,
    ),
    Fault(
        "pinned memory is exhausted", "goes on", "the limit of host memory is reached",
        always(tide.faults.exhaust_pinned_memory), first=True,
    ),
    Fault("host_bytes is too small", "goes on", "the limit of host memory is reached", nothing,
          limits={"host_bytes": 10_000}),
    Fault("host_bytes is too small", "goes on", "the limit of host memory is reached", nothing, device="cpu",
          limits={"host_bytes": 10_000}),
    Fault("the disk is full", "goes on", "host memory is used: No space left", full_disk, tier="disk"),
    Fault("the disk is full", "goes on", "host memory is used: No space left", full_disk, tier="disk", device="cpu"),
    Fault("files may not grow", "goes on", "host memory is used: File too large", no_growth, tier="disk", first=True),
    Fault("disk_bytes is too small", "goes on", "the limit of the disk is reached", nothing, tier="disk",
          limits={"disk_bytes": 10_000}),
    Fault("the disk's directory does not exist", "goes on", "host memory is used: No such file", nothing, tier="disk",
          limits={"disk_directory": "/nowhere/at/all"}),
    Fault("the disk cannot be read", "stops", "SwapError", between(unreadable), SwapError, "Input/output", tier="disk"),
    Fault("the disk cannot be read", "stops", "SwapError", between(unreadable), SwapError, "Input/output", tier="disk",
          device="cpu"),
    Fault("bits on the disk are flipped", "stops", "SwapError", between(corrupted), SwapError, "other bytes",
          tier="disk"),
    Fault("bits on the disk are flipped", "stops", "SwapError", between(corrupted), SwapError, "other bytes",
          tier="disk", device="cpu"),
    Fault("the disk's file is cut off", "stops", "SwapError", between(truncated), SwapError, "was read from disk",
          tier="disk"),
    Fault("the disk's file is full of zeros", "stops", "SwapError", between(zeroed), SwapError, "other bytes",
          tier="disk"),
    Fault("the model raises in forward", "stops", "its own exception", interrupted("forward"), Interruption),
    Fault("the model raises in forward", "stops", "its own exception", interrupted("forward"), Interruption,
          tier="disk"),
    Fault("the model raises in forward", "stops", "its own exception", interrupted("forward"), Interruption,
          first=True),
    Fault("a hook raises in backward", "stops", "its own exception", interrupted("backward"), Interruption),
    Fault("a hook raises in backward", "stops", "its own exception", interrupted("backward"), Interruption,
          tier="disk"),
)  # fmt: skip


def settle(session: Session, expected: int | None = None) -> int:
    """Device bytes when everything that was dropped has ended; after an exception a graph ends late."""
    if session.handle is not None and session.attached.manager._disk is not None:
        session.written()
    for _ in range(200):
        gc.collect()
        if expected is None or torch.accelerator.memory_allocated() == expected:
            break
        time.sleep(0.01)
    return int(torch.accelerator.memory_allocated())


HEAD = """# When something fails

<!-- Written by tests/support/fault_cases.py; tests/faults holds every line of it to its word. -->

A run with lowtide either goes on, with the loss and every gradient bitwise as without it, or stops with an exception.
It never goes on with other numbers. After an exception nothing is held, and the step can be retried.

| what fails | tier | device | what happens | what the receipt or the exception says |
|---|---|---|---|---|
"""
TAIL = """| the process is killed (`SIGKILL`) | disk | cpu | stops | nothing is left in the directory |

`tide` is the virtual accelerator of `packages/tide`, on which copies and allocations can be made to fail. The disk is
made to fail by the kernel's own means: `/dev/full`, `/proc/self/mem`, a limit on file sizes, and bytes that are changed
behind lowtide's back. Each step that goes on or is retried is compared with the run without lowtide.
"""


def as_markdown() -> str:
    """The page of the documentation."""
    rows = []
    for fault in FAULTS:
        name = fault.fault + (", in the first step" if fault.first and fault.happens == "stops" else "")
        seen = f"`{fault.seen}`" if fault.error in (SwapError, torch.OutOfMemoryError) else fault.seen or "–"
        rows.append(f"| {name} | {fault.tier} | {fault.device} | {fault.happens} | {seen} |\n")
    return HEAD + "".join(rows) + TAIL


if __name__ == "__main__":
    (Path(__file__).parents[2] / "docs" / "faults.md").write_text(as_markdown(), encoding="utf-8")

"""Faults to arm. Each call replaces what was armed before; numbers count from one, from then on."""

from __future__ import annotations

from collections.abc import Callable

from . import _C


def fail_allocation(number: int) -> None:
    """The allocation of that number raises `torch.OutOfMemoryError`, whatever is free."""
    _C.arm({"fail_allocation": _positive(number)})


def shrink_capacity(number: int, nbytes: int) -> None:
    """From that allocation on the capacity is what is then allocated, less `nbytes`."""
    _C.arm({"shrink_allocation": _positive(number), "shrink_bytes": int(nbytes)})


def fail_copy(number: int) -> None:
    """The copy of that number between host and device raises `RuntimeError`."""
    _C.arm({"fail_copy": _positive(number)})


def delay_copy(number: int, nanoseconds: int) -> None:
    """The copy of that number takes longer by so much."""
    _C.arm({"delay_copy": _positive(number), "delay": int(nanoseconds)})


def reorder_copy(number: int) -> None:
    """The copy of that number lets one of its own size overtake it on the link."""
    _C.arm({"reorder_copy": _positive(number)})


def exhaust_pinned_memory() -> None:
    """Pinning host memory fails from now on."""
    _C.arm({"pinned_exhausted": True})


def disarm() -> None:
    """No faults."""
    _C.arm({})


def allocations_seen() -> int:
    """How many allocations there were since the last arming, `disarm()` included."""
    return _C.faults_seen()[0]


def copies_seen() -> int:
    """How many copies there were since the last arming, `disarm()` included."""
    return _C.faults_seen()[1]


def on_allocation_failure(callback: Callable[[int, int], bool] | None) -> None:
    """Call `callback(nbytes, device_index)` when an allocation fails; True means "try again".

    Off by default, because CUDA has no such callback: code under test must not need it.
    """
    _C.on_allocation_failure(callback)


def _positive(number: int) -> int:
    if number < 1:
        raise ValueError(f"counting starts at one, not at {number}")
    return int(number)

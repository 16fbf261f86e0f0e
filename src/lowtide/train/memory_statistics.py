"""The memory of a run in a few lines: what ``MS_MEMORY_STATISTIC=1`` prints at its end."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.runtime.receipt import Receipt

__all__ = ["memory_statistics", "wants_memory_statistics"]

MEBIBYTE = 2**20


def wants_memory_statistics(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether ``MS_MEMORY_STATISTIC`` asks for them; 1 and 2 do, in the reference too."""
    return environment.get("MS_MEMORY_STATISTIC", "0") not in ("", "0")


def memory_statistics(receipts: Iterable[Receipt] = ()) -> list[str]:
    """What can be said about this rank's memory, a line each: the device's, the process's, and what lowtide moved.

    The device's lines have MindSpore's words, so that ``grep 'Used peak'`` finds them. No operator is named in them:
    the guide's ``grep`` for an operator must find the lines of the strategy only.
    """
    import torch

    lines: list[str] = []
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        lines.append("Device memory: no accelerator, the run is on the CPU")
    else:
        try:
            free, total = torch.accelerator.get_memory_info()
            lines.append(f"Device {device.type} memory size: {total // MEBIBYTE}M, {free // MEBIBYTE}M of it free now")
        except (RuntimeError, NotImplementedError):  # not every backend can say
            lines.append(f"Device {device.type} memory size: the backend does not say")
        used, actual = torch.accelerator.max_memory_allocated(), torch.accelerator.max_memory_reserved()
        lines.append(f"Used peak memory usage (without fragments): {used // MEBIBYTE}M")
        lines.append(f"Actual peak memory usage (with fragments): {actual // MEBIBYTE}M")
    peak = _peak_resident()
    if peak is not None:
        lines.append(f"Process peak memory: {peak // MEBIBYTE}M")
    moved = freed = kept = 0
    stall = 0.0
    for receipt in receipts:
        for one in receipt.settings:
            moved += one.moved_bytes
            kept += one.kept_bytes
            freed += one.freed_bytes or 0
            stall += one.stall_seconds
    if moved or freed or kept:
        lines.append(
            f"Activations in all steps: {format_bytes(moved)} moved to the host, {format_bytes(freed)} freed before"
            f" backward, {format_bytes(kept)} kept that were to be offloaded, {stall:.3f} s waited for copies"
        )
    return lines


def _peak_resident() -> int | None:
    """The most memory this process ever held; None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

"""How much a swap may take: host memory, disk, and copies in flight."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field

__all__ = ["IN_FLIGHT_BYTES", "MINIMUM_BYTES", "Limits"]

IN_FLIGHT_BYTES = 2 << 30
MINIMUM_BYTES = 4096


def _share_of_host_memory() -> int:
    """Half of the machine's memory, divided by the ranks that run on it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total // 2 // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The caps of swapping. Where one is reached a tensor stays on the device, and the receipt says so."""

    host_bytes: int = field(default_factory=_share_of_host_memory)
    """Host memory for swapped tensors, pinned where the device has it. Half of the machine's, shared by its ranks."""
    disk_bytes: int = 1 << 40
    """Space on disk."""
    in_flight_bytes: int = IN_FLIGHT_BYTES
    """Device memory of tensors in flight: offloaded and not freed yet, or reloaded and not used yet."""
    minimum_bytes: int = MINIMUM_BYTES
    """Smaller tensors stay where they are: the copy would cost more than it frees."""
    disk_directory: str = field(default_factory=tempfile.gettempdir)
    """Where the disk tier keeps its file. The file has no name: nothing is left behind, whatever happens."""

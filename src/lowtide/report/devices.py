"""The table of known devices on a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from lowtide.cost.device import Device
from lowtide.units import format_bytes

__all__ = ["print_devices"]

_LAST = "what it is, and whose figures"
_COLUMNS = (
    "name",
    "memory",
    "reserve",
    "each group",
    "bf16 TFLOPS",
    "memory GB/s",
    "link GB/s",
    "host GB/s",
    "node",
    _LAST,
)


def print_devices(devices: Iterable[Device], console: Console) -> None:
    """Print a line for each device."""
    listed = list(devices)
    shared = set.intersection(*(set(device.notes) for device in listed)) if listed else set()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name in ("name", _LAST) else "right")
    for device in listed:
        table.add_row(
            device.name,
            format_bytes(device.capacity),
            format_bytes(device.reserve.total()),
            format_bytes(device.reserve.communication),
            f"{device.flops.get('bfloat16', 0.0) / 1e12:,.0f}",
            f"{device.memory_bandwidth / 1e9:,.0f}",
            f"{device.link_out / 1e9:,.0f}" + (f" for {device.link_sharing}" if device.link_sharing > 1 else ""),
            f"{device.host_bandwidth / 1e9:,.0f}",
            str(device.devices_per_node),
            "; ".join(filter(None, (*(note for note in device.notes if note not in shared), device.source))),
        )
    console.print(table)
    console.print(
        "nominal figures, dense; `lowtide calibrate` measures a device that is here and writes a file for --device",
        soft_wrap=True,
    )
    console.print(
        "link, host: to the host's memory, and of that memory, which the devices of a node share: in a plan all of them"
        " swap at the same time",
        soft_wrap=True,
    )
    console.print(
        "reserve: memory that the driver and workspaces take, and each process group in addition; assumed, and not in"
        " the budget unless one is given; --reserve says otherwise",
        soft_wrap=True,
    )

"""What ``lowtide calibrate`` shows."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from lowtide.cost.device import Device
from lowtide.units import format_bytes, format_seconds

__all__ = ["print_calibration"]


def print_calibration(device: Device, failed: Mapping[str, str], console: Console) -> None:
    """Print a measured device, and the kernels that could not be measured."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("what")
    table.add_column("value", justify="right")
    for dtype, rate in sorted(device.flops.items()):
        table.add_row(f"products, {dtype}", f"{rate / 1e12:.4g} TFLOP/s")
    table.add_row("memory", f"{device.memory_bandwidth / 1e9:.4g} GB/s")
    table.add_row("link out", f"{device.link_out / 1e9:.4g} GB/s")
    table.add_row("link in", f"{device.link_in / 1e9:.4g} GB/s")
    table.add_row("an empty copy", format_seconds(device.copy_latency))
    table.add_row("an empty kernel", format_seconds(device.kernel_latency))
    table.add_row("issuing a kernel", format_seconds(device.launch) if device.launch else "hidden")
    console.print(f"{device.name}, {format_bytes(device.capacity)}")
    console.print(table)
    kinds = sum("::" in name for name in device.efficiency)
    console.print(f"{len(device.measured)} kernels measured one by one, efficiencies fitted to {kinds} kinds")
    for note in device.notes:
        console.print(f"note: {note}")
    for key, why in list(failed.items())[:5]:
        console.print(f"not measured: {key}: {why}")
    if len(failed) > 5:
        console.print(f"and {len(failed) - 5} more")

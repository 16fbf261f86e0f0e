"""What ``lowtide selftest`` shows."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from lowtide.units import format_bytes, format_seconds

__all__ = ["print_selftest"]


def print_selftest(result: dict[str, Any], console: Console) -> None:
    """Print the result of a selftest."""
    size = result["size"]
    console.print(
        f"{result['device']} ({result['device_name']}), torch {result['torch']}: {size['layers']} layers of width"
        f" {size['width']}, {size['batch']} x {size['sequence']} tokens"
    )
    wrong = [case for case in result["parity"] if not case["exact"]]
    if wrong:
        for case in wrong:
            console.print(f"[bold red]not exact[/]: {case['policy']}, {case['dtype']}: {case['error']}")
    else:
        console.print(
            f"exact: {len(result['parity'])} of {len(result['parity'])} runs are bitwise the same without lowtide"
        )
    table = Table(box=None, pad_edge=False)
    table.add_column("policy")
    for name in ("step", "against bare", "peak saved", "moved", "copies", "stalls", "recompute"):
        table.add_column(name, justify="right")
    for step in result["steps"]:
        saved = step["peak_saved_bytes"]
        table.add_row(
            step["policy"],
            format_seconds(step["seconds"]),
            f"{step['time_ratio']:.3f}",
            "" if saved is None else format_bytes(saved) if saved >= 0 else f"-{format_bytes(-saved)}",
            format_bytes(step["moved_bytes"]) if step["moved_bytes"] else "",
            *(
                format_seconds(step[clock]) if step[clock] else ""
                for clock in ("copy_seconds", "stall_seconds", "recompute_seconds")
            ),
        )
    console.print(table)

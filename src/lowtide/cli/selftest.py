"""``lowtide selftest``: prove lowtide on the device that is here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["selftest"]

Device = Annotated[
    str | None, typer.Option("--device", help="cuda, xpu, npu, cpu …; the accelerator that is present unless given.")
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="The file to write; lowtide-selftest-DEVICE.json unless given.")
]
Small = Annotated[bool, typer.Option("--small", help="A small model: seconds rather than minutes, no timing to trust.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the JSON object instead of tables.")]


def selftest(device: Device = None, output: Output = None, small: Small = False, as_json: AsJson = False) -> None:
    """Run parity, swap overlap and peak memory on this machine's accelerator, and write one JSON file.

    Parity compares loss and gradients with and without lowtide, bit by bit, for eight policies in fp32 and bf16. Exit
    code 1 if anything differs.

    Example: [bold]lowtide selftest --output h100.json[/bold]
    """
    import gc
    import json

    gc.enable()  # the entry point turned it off for commands that end at once

    import torch
    from rich.console import Console

    from lowtide.report.selftest import print_selftest
    from lowtide.runtime.selftest import Size, run_selftest, size_for

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    where = torch.device(device) if device else accelerator or torch.device("cpu")
    size = Size(3, 64, 32, 2, 2) if small else size_for(where)
    console = Console(stderr=True, highlight=False)
    with console.status("") as status:  # shown on a terminal only
        result = run_selftest(where, size, status.update)
    path = output or Path(f"lowtide-selftest-{where.type}.json")
    path.write_text(json.dumps(result, indent=1) + "\n")
    if as_json:
        typer.echo(json.dumps(result))
    else:
        print_selftest(result, Console(highlight=False))
        typer.echo(f"written to {path}")
    if not result["exact"]:
        raise typer.Exit(1)

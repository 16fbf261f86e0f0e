"""``lowtide calibrate``: measure the device that is here, for plans made anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["calibrate"]

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL|TRACE",
        help="Measure this one's kernels too: a Trace, a training file, a built-in shape such as llama3-8b, a directory"
        " with config.json, or module:function.",
        show_default=False,
    ),
]
Output = Annotated[Path, typer.Option("--output", "-o", help="The file to write.")]
On = Annotated[
    str | None, typer.Option("--device", help="cuda, xpu, npu, cpu …; the accelerator that is present unless given.")
]
Like = Annotated[
    str | None,
    typer.Option(
        "--like",
        metavar="NAME|FILE",
        help="Take what one process cannot measure, interconnect and network, from this device.",
        show_default=False,
    ),
]
Sequence = Annotated[
    int | None, typer.Option("--seq", min=1, metavar="N", help="Tokens of a sample.", show_default=False)
]
Samples = Annotated[
    int | None,
    typer.Option("--micro-batch-size", min=1, metavar="N", help="Samples of a micro-batch.", show_default=False),
]
Seconds = Annotated[float, typer.Option("--seconds", min=1, help="About how long to measure where times vary.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the device as one JSON object.")]


def calibrate(
    source: Source = None,
    output: Output = Path("device.json"),
    device: On = None,
    like: Like = None,
    sequence: Sequence = None,
    samples: Samples = None,
    seconds: Seconds = 120,
    as_json: AsJson = False,
) -> None:
    """Measure this machine's device: its links, its kernels and what issuing one costs; and write them into a file.

    `lowtide plan --device device.json` then plans with measured times. Kernels that MODEL or TRACE names are measured
    one by one; for all others, rates are fitted to a standard set.

    Example: [bold]lowtide calibrate llama3-8b --seq 8192 --like h100 -o device.json[/bold]
    """
    import gc
    import json

    gc.enable()  # the entry point turned it off for commands that end at once

    import torch
    from rich.progress import Progress

    from lowtide.cli.console import make_console
    from lowtide.cli.traced import LayoutOptions, trace_of
    from lowtide.cost.calibrate import calibrate as measure
    from lowtide.cost.devices import find_device
    from lowtide.cost.imagined import device_kernels
    from lowtide.errors import LowtideError
    from lowtide.report.calibration import print_calibration
    from lowtide.trace.trace import kernels_of

    try:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        where = torch.device(device) if device else accelerator or torch.device("cpu")
    except RuntimeError as error:
        typer.echo(f"error: --device {device}: {str(error).splitlines()[0]}", err=True)
        raise typer.Exit(1) from None
    try:
        base = find_device(like) if like is not None else None
        console = make_console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("tracing", total=None)

            def show(what: str, done: int, total: int) -> None:
                progress.update(task, description=what, completed=done, total=total)

            layout = LayoutOptions(sequence=sequence, samples=samples)
            with device_kernels("cpu" if where.type == "cpu" else "other"):
                kernels = kernels_of(trace_of(source, layout).trace) if source is not None else []
            found = measure(where, kernels, like=base, seconds=seconds, progress=show)
        found.device.save(output)
    except LowtideError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    except OSError as error:
        typer.echo(f"error: {output}: {error.strerror}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(found.device.as_json()))
    else:
        print_calibration(found.device, found.failed, make_console())
        typer.echo(f"written to {output}")

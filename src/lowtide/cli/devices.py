"""``lowtide devices``: the devices that a plan can be made for without having one."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["devices"]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, devices by name.")]


def devices(as_json: AsJson = False) -> None:
    """List the devices that `lowtide plan --device` knows, with their memory and speed.

    The figures are those of data sheets. `lowtide calibrate` measures a device that is here.

    Example: [bold]lowtide devices[/bold]
    """
    from lowtide.cost.devices import DEVICES

    if as_json:
        import json

        known = {name: {**device.as_json(), "budget": device.budget} for name, device in DEVICES.items()}
        typer.echo(json.dumps(known))
        return
    from lowtide.cli.console import make_console
    from lowtide.report.devices import print_devices

    print_devices(DEVICES.values(), make_console())

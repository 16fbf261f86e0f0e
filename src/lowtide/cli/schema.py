"""``lowtide schema``: the JSON Schema of a training file, for an editor to complete and check it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["schema"]

Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write to a file instead of the terminal.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print on a single line.")]


def schema(output: Output = None, as_json: AsJson = False) -> None:
    """Print the JSON Schema of a training file.

    Point the editor at it and it completes and checks keys while you type, for instance with a
    first line [bold]# yaml-language-server: $schema=lowtide.schema.json[/bold]

    Example: [bold]lowtide schema -o lowtide.schema.json[/bold]
    """
    import json

    from lowtide.config.schema import json_schema

    text = json.dumps(json_schema(), indent=None if as_json else 2)
    if output is None:
        typer.echo(text)
    else:
        output.write_text(text + "\n", encoding="utf-8")

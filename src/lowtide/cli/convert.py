"""``lowtide convert``: the same recompute and swap settings in the other form."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lowtide.cli.check import Set, parse_overrides

__all__ = ["convert"]


class Form(StrEnum):
    """The forms a file can be written in."""

    form_2026 = "2026"
    legacy = "legacy"


File = Annotated[Path, typer.Argument(metavar="FILE", help="A YAML file.", show_default=False)]
To = Annotated[Form, typer.Option("--to", help="The form to write.", show_default=False)]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write to a file instead of the terminal.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object: the settings and what was lost.")]


def convert(file: File, to: To, output: Output = None, as_json: AsJson = False, overrides: Set = None) -> None:
    """Write the recompute and swap settings of FILE in the other form.

    What the other form cannot express is said on standard error, and the exit code is then 3. A
    file that cannot be used exits with 1, as [bold]lowtide check[/bold] does.

    Example: [bold]lowtide convert pretrain.yaml --to 2026[/bold]
    """
    import json

    from lowtide.cli.console import make_console
    from lowtide.config.check import check_file
    from lowtide.config.convert import convert_form
    from lowtide.config.parse import write_document
    from lowtide.operators.names import layer_operators
    from lowtide.report.terminal import print_problems

    result = check_file(file, layer_operators, parse_overrides(overrides or []))
    console = make_console(stderr=True)
    if not result.ok:
        print_problems(result, console)
        raise typer.Exit(1)
    if result.form is None:
        console.print(f"{file}: there are no recompute or swap settings to convert")
        raise typer.Exit(1)
    try:
        value, lost = convert_form(result, to.value)
    except ValueError as error:
        console.print(f"{file}: {error}")
        raise typer.Exit(1) from None
    if as_json:
        text = json.dumps({"file": str(file), "to": to.value, "settings": value, "lost": lost})
    else:
        text = write_document(value).rstrip("\n")
    if output is None:
        typer.echo(text)
    else:
        output.write_text(text + "\n", encoding="utf-8")
    for line in lost:
        console.print(f"not expressed: {line}", soft_wrap=True)
    if lost:
        raise typer.Exit(3)

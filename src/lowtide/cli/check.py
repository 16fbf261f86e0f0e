"""``lowtide check``: what a file means, layer by layer, or what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["check", "parse_overrides"]

Files = Annotated[list[Path], typer.Argument(metavar="FILE", help="YAML files to check.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object a file, one a line.")]
NoColor = Annotated[bool, typer.Option("--no-color", help="Print without colours, as on anything but a terminal.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Add or replace a value, such as model.model_config.num_layers=48."
    ),
]


def check(files: Files, as_json: AsJson = False, no_color: NoColor = False, overrides: Set = None) -> None:
    """Say what the recompute and swap settings of FILE mean, or what is wrong with them.

    Prints how every setting was understood, a table of what becomes of each layer, and warnings.
    Exits with 1 and all errors at once if a file cannot be used.

    Example: [bold]lowtide check pretrain_llama.yaml[/bold]
    """
    from lowtide.config.check import check_file
    from lowtide.operators.names import layer_operators

    values = parse_overrides(overrides or [])
    failed = False
    for file in files:
        result = check_file(file, layer_operators, values)
        failed |= not result.ok
        if as_json:
            import json

            typer.echo(json.dumps(result.as_json()))
            continue
        from rich.console import Console

        from lowtide.report.terminal import print_check, print_problems

        if len(files) > 1:
            typer.echo(f"{file}:")
        print_check(result, Console(no_color=no_color, highlight=False, markup=False, emoji=False))
        console = Console(stderr=True, no_color=no_color, highlight=False, markup=False, emoji=False)
        print_problems(result, console)
    if failed:
        raise typer.Exit(1)


def parse_overrides(texts: list[str]) -> dict[tuple[str | int, ...], Any]:
    """Read ``KEY=VALUE`` texts; the value is YAML, the key a dotted path."""
    from lowtide.config.document import parse_value

    result: dict[tuple[str | int, ...], Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        parts = tuple(key.split("."))
        if not equals or not all(parts):
            raise typer.BadParameter(f"expected KEY=VALUE, such as model.model_config.num_layers=48; found {text!r}")
        try:
            result[parts] = parse_value(value)
        except ValueError as error:
            raise typer.BadParameter(f"the value of {key} is not YAML: {error}") from None
    return result

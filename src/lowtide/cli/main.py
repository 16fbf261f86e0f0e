"""The ``lowtide`` command."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import typer

from lowtide.cli.calibrate import calibrate
from lowtide.cli.check import check
from lowtide.cli.convert import convert
from lowtide.cli.devices import devices
from lowtide.cli.explain import explain
from lowtide.cli.operators import operators
from lowtide.cli.plan import plan
from lowtide.cli.report import report
from lowtide.cli.run import run
from lowtide.cli.schema import schema
from lowtide.cli.selftest import selftest
from lowtide.cli.train import train

__all__ = ["app"]

app = typer.Typer(
    name="lowtide",
    help="Decide which activations of a training run to keep, recompute or swap.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
COMMANDS = (calibrate, check, convert, devices, explain, operators, plan, report, run, schema, selftest, train)


def _help(function: Callable[..., None]) -> str:
    """What the docstring says, a paragraph a line: it is wrapped where the terminal ends."""
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in paragraphs)


for _command in COMMANDS:
    # What follows a script is the script's.
    _context = {"allow_interspersed_args": False} if _command is run else None
    app.command(help=_help(_command), context_settings=_context)(_command)


def _version(value: bool) -> None:
    if value:
        from lowtide import __version__

        typer.echo(f"lowtide {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Decide which activations of a training run to keep, recompute or swap."""

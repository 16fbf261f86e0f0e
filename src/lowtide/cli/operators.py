"""``lowtide operators``: what a model's operators are called, and what each holds for backward."""

from __future__ import annotations

from typing import Annotated

import typer

from lowtide.cli.model import Autocast, Batch, LayersAt, Precision, Sequence, survey_model

__all__ = ["operators"]

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A directory with config.json, or module:function.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def operators(
    model: Model,
    batch: Batch = 1,
    sequence: Sequence = 2048,
    autocast: Autocast = Precision.none,
    layers: LayersAt = None,
    as_json: AsJson = False,
) -> None:
    """List the operators of MODEL, in its layers and outside them, with the bytes each holds for backward.

    The model is run once with fake tensors: no weights are loaded, no memory is taken. A function given as
    [bold]module:function[/bold] returns a model, or a model with the arguments to call it with.

    Example: [bold]lowtide operators ./llama-8b --sequence 4096 --autocast bf16[/bold]
    """
    import json

    from lowtide.cli.console import make_console
    from lowtide.report.operators import print_survey, survey_as_json

    found = survey_model(model, batch, sequence, autocast, layers)
    if as_json:
        typer.echo(json.dumps(survey_as_json(found)))
    else:
        print_survey(found, make_console())

"""``lowtide operators``: what a model's operators are called, and what each holds for backward."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

__all__ = ["operators"]


class Precision(StrEnum):
    """The dtype that autocast computes in."""

    none = "none"
    bf16 = "bf16"
    fp16 = "fp16"


Model = Annotated[str, typer.Argument(metavar="MODEL", help="A directory with config.json, or module:function.")]
Batch = Annotated[int, typer.Option("--batch", min=1, help="Samples in a batch.")]
Sequence = Annotated[int, typer.Option("--sequence", min=1, help="Tokens in a sample.")]
Autocast = Annotated[Precision, typer.Option("--autocast", help="Run under autocast to this dtype.")]
LayersAt = Annotated[str | None, typer.Option("--layers", help="The module that holds the layers.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def operators(
    model: Model,
    batch: Batch = 1,
    sequence: Sequence = 2048,
    autocast: Autocast = Precision.none,
    layers: LayersAt = None,
    as_json: AsJson = False,
) -> None:
    """List the operators of MODEL's layers, with the bytes each holds for backward.

    The model is run once with fake tensors: no weights are loaded, no memory is taken. A function given as
    [bold]module:function[/bold] returns a model, or a model with the arguments to call it with.

    Example: [bold]lowtide operators ./llama-8b --sequence 4096 --autocast bf16[/bold]
    """
    import gc
    import json

    import torch
    from rich.console import Console

    from lowtide._torch_private import FakeTensorMode
    from lowtide.errors import LowtideError
    from lowtide.operators.load import load_model
    from lowtide.operators.survey import survey
    from lowtide.report.operators import print_survey, survey_as_json

    gc.enable()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(autocast.value)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            loaded = load_model(model, batch=batch, sequence=sequence)
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                found = survey(loaded.model, lambda: loaded.model(*loaded.args, **loaded.kwargs), layers=layers)
    except LowtideError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(survey_as_json(found)))
    else:
        print_survey(found, Console(highlight=False, markup=False, emoji=False))

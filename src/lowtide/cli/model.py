"""The model that a command is given: its options, and one run of it with fake tensors."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from lowtide.operators.survey import Survey

__all__ = ["Autocast", "Batch", "LayersAt", "Precision", "Sequence", "survey_model"]


class Precision(StrEnum):
    """The dtype that autocast computes in."""

    none = "none"
    bf16 = "bf16"
    fp16 = "fp16"


Batch = Annotated[int, typer.Option("--batch", min=1, help="Samples in a batch.")]
Sequence = Annotated[int, typer.Option("--sequence", min=1, help="Tokens in a sample.")]
Autocast = Annotated[Precision, typer.Option("--autocast", help="Run under autocast to this dtype.")]
LayersAt = Annotated[str | None, typer.Option("--layers", help="The module that holds the layers.", show_default=False)]


def survey_model(source: str, batch: int, sequence: int, autocast: Precision, layers: str | None) -> Survey:
    """Run the model that ``source`` names once, without weights; prints the error and exits with 1 if that fails."""
    import gc

    gc.enable()  # the entry point turned it off for commands that end at once
    import torch

    from lowtide.errors import LowtideError
    from lowtide.operators.load import survey_source

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(autocast.value)
    try:
        return survey_source(source, batch=batch, sequence=sequence, autocast=dtype, layers=layers)
    except LowtideError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None

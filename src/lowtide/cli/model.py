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
    import logging
    import os

    gc.enable()  # the entry point turned it off for commands that end at once
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

    import torch

    from lowtide._torch_private.fake import FakeTensorMode
    from lowtide.errors import LowtideError
    from lowtide.operators.load import does_not_run, load_model, one_sequence_each
    from lowtide.operators.survey import survey

    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # the error below says it
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(autocast.value)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            loaded = load_model(source, batch=batch, sequence=sequence)
            try:
                with one_sequence_each(), torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                    return survey(loaded.model, lambda: loaded.model(*loaded.args, **loaded.kwargs), layers=layers)
            except LowtideError:
                raise
            except Exception as error:
                raise does_not_run(source, error) from error
    except LowtideError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None

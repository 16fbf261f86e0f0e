"""The error for a name that torch no longer has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lowtide.errors import UnsupportedTorchError

__all__ = ["needed_for"]


@contextmanager
def needed_for(feature: str) -> Iterator[None]:
    """Private names of torch are reached for inside; one that is missing is an error that says what needed it."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise UnsupportedTorchError(
            f"lowtide needs a private name for {feature} that torch {torch.__version__} does not have: {error};"
            " expected torch 2.13 to 2.15: install one of these, or a lowtide that knows this torch"
        ) from error

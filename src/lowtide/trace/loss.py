"""The loss in what a user's function returned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lowtide.errors import TraceError

__all__ = ["loss_of"]


def loss_of(output: Any) -> Tensor:
    """The loss that ``output`` is or has: a number that requires a gradient, ``.loss`` or ``["loss"]`` of what models
    of transformers return, or the first of a tuple. TraceError otherwise, with what it is."""
    found = output
    if isinstance(found, (tuple, list)) and found and not hasattr(found, "loss"):
        found = found[0]
    if isinstance(found, Mapping):
        found = found.get("loss")
    elif not isinstance(found, Tensor):
        found = getattr(found, "loss", None)
    if isinstance(found, Tensor) and found.numel() == 1 and found.requires_grad:
        return found.squeeze()
    raise TraceError(f"run() returned {_described(output)}; expected the loss: one number that requires a gradient")


def _described(output: Any) -> str:
    if isinstance(output, Tensor):
        detached = "" if output.requires_grad else " that requires no gradient"
        return f"a tensor of shape {tuple(output.shape)}{detached}"
    kind = type(output).__name__
    if isinstance(output, (tuple, list)):
        return f"a {kind} that begins with {_described(output[0])}" if output else f"an empty {kind}"
    if isinstance(output, Mapping) or hasattr(output, "loss"):
        return f"a {kind} without a loss (models of transformers compute it if they are given labels=)"
    return "nothing: it has no return" if output is None else f"a {kind}"

"""Models and optimizers that a user hands to a framework, in one call or in several: which belong together."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, TypeVar

from torch import nn

from lowtide.errors import ModelError
from lowtide.integrations.attachment import Attachment, innermost
from lowtide.operators.layers import find_layers

__all__ = ["Pairs", "has_layers", "optimizers_of"]

Held = TypeVar("Held")


class Pairs:
    """Begins an adaptive run for each model that has layers, once all its optimizers can be known."""

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment
        self._models: list[nn.Module] = []
        """Those that have no optimizer yet."""

    def add(self, models: Iterable[nn.Module], optimizers: Iterable[Any], scaler: Any = None) -> None:
        """These were prepared; an optimizer is one of the model that holds its parameters."""
        for model in models:
            if all(model is not one for one in self._models):
                self._models.append(model)
        unpaired = list(optimizers)
        for model in list(self._models):
            if theirs := optimizers_of(model, unpaired):
                unpaired = [one for one in unpaired if all(one is not its for its in theirs)]
                self._models = [one for one in self._models if one is not model]
                self._begin(model, theirs, scaler)
        for optimizer in unpaired:
            _warn(
                f"{type(innermost(optimizer)).__name__} holds no parameter of a model that was prepared before it or"
                " together with it, so nothing is measured or planned: prepare the model first"
            )

    def _begin(self, model: nn.Module, optimizers: list[Any], scaler: Any) -> None:
        if has_layers(model, self.attachment.settings.layers):
            self.attachment.adapt(model, optimizers, scaler)
        else:
            _warn(f"{type(model).__name__} has no layers of one kind, so nothing is measured or planned for it")


def optimizers_of(model: nn.Module, optimizers: Iterable[Held]) -> list[Held]:
    """Those that hold parameters of a model; a framework may have wrapped them."""
    parameters = {id(one) for one in model.parameters()}
    return [
        optimizer
        for optimizer in optimizers
        if any(id(one) in parameters for group in innermost(optimizer).param_groups for one in group["params"])
    ]


def has_layers(model: nn.Module, layers: str | None) -> bool:
    """Whether there is something to decide in a model; ModelError if ``layers`` names none."""
    try:
        find_layers(model, layers)
    except ModelError:
        if layers is not None:
            raise
        return False
    return True


def _warn(text: str) -> None:
    warnings.warn(f"lowtide: {text}", UserWarning, stacklevel=4)

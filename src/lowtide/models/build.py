"""Build the model of a shape, whole or the part that one pipeline stage holds."""

from __future__ import annotations

from collections.abc import Iterable

from lowtide.errors import ModelError
from lowtide.models.decoder import Decoder
from lowtide.models.deepseek import deepseek_layer
from lowtide.models.layer import DecoderLayer
from lowtide.models.llama import llama_layer
from lowtide.models.prediction import Predictions
from lowtide.models.shape import DecoderShape

__all__ = ["build_model"]


def build_model(
    shape: DecoderShape, *, layers: Iterable[int] | None = None, first: bool = True, last: bool = True
) -> Decoder:
    """The model of a shape; under ``torch.device("meta")`` it takes no memory.

    A pipeline stage has some of the layers, an embedding if it is the first, a head and the multi-token-prediction
    layers if it is the last. Weights are filled by :func:`~lowtide.models.initialise.initialise`.
    """
    chosen = range(shape.num_layers) if layers is None else list(layers)
    if beyond := [number for number in chosen if not 0 <= number < shape.num_layers]:
        raise ModelError(f"layers {beyond} were asked for; the model has layers 0 to {shape.num_layers - 1}")
    predictions = None
    if shape.prediction_layers and last:
        numbers = range(shape.num_layers, shape.num_layers + shape.prediction_layers)
        predictions = Predictions(shape, {number: _layer(shape, number) for number in numbers})
    made = {number: _layer(shape, number) for number in chosen}
    return Decoder(shape, made, first=first, last=last, predictions=predictions)


def _layer(shape: DecoderShape, number: int) -> DecoderLayer:
    if shape.latent is None and shape.experts is None:
        return llama_layer(shape)
    return deepseek_layer(shape, number)

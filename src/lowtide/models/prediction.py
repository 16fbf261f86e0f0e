"""Multi-token prediction: layers after the last one that predict the token after the next, and so on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowtide.models.auxiliary import Auxiliary
from lowtide.models.layer import DecoderLayer
from lowtide.models.shape import DecoderShape

__all__ = ["PredictionLayer", "Predictions", "prediction_loss"]


class PredictionLayer(nn.Module):
    """One layer more, from the hidden states before it and the tokens that come next."""

    def __init__(self, shape: DecoderShape, layer: DecoderLayer) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.hidden_norm = nn.RMSNorm(width, eps=eps)
        self.embedding_norm = nn.RMSNorm(width, eps=eps)
        self.projection = nn.Linear(2 * width, width, bias=False)
        self.layer = layer
        self.norm = nn.RMSNorm(width, eps=eps)

    def forward(self, hidden: Tensor, embedded: Tensor, rotary: Tensor) -> Tensor:
        both = torch.cat((self.hidden_norm(hidden), self.embedding_norm(embedded)), -1)
        output: Tensor = self.layer(self.projection(both), rotary)
        return output


class Predictions(nn.Module):
    """The prediction layers, known by their numbers after those of the model. They share its embedding and head.

    Their targets are the tokens of the sequence itself, as far as it goes: what labels would leave out is not known
    here. Their loss is the mean over them, times the shape's factor, and reaches the gradient by itself.
    """

    def __init__(self, shape: DecoderShape, layers: dict[int, DecoderLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): PredictionLayer(shape, layer) for number, layer in layers.items()})
        self.factor = shape.prediction_factor
        self.auxiliary = Auxiliary()

    def forward(
        self,
        hidden: Tensor,
        tokens: Tensor,
        rotary: Tensor,
        embedding: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """The loss, from the last layer's hidden states."""
        losses = []
        for depth, layer in enumerate(self.layers.values(), 1):
            assert isinstance(layer, PredictionLayer)
            if tokens.shape[1] <= depth + 1:
                break
            hidden = layer(hidden[:, :-1], embedding(tokens[:, depth:]), rotary)
            logits = head(layer.norm(hidden[:, :-1]))
            losses.append(functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, depth + 1 :].flatten()))
        if not losses:
            return hidden.new_zeros(())
        return torch.stack(losses).mean() * self.factor


def prediction_loss(model: nn.Module) -> Tensor | None:
    """The sum of the prediction layers' loss over the micro-batches since the last reset; None if there is none."""
    for module in model.modules():
        if isinstance(module, Predictions):
            return module.auxiliary.value
    return None

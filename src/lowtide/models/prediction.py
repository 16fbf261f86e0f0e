"""Multi-token prediction: layers after the last one that predict the token after the next, and so on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lowtide.models.auxiliary import Auxiliary
from lowtide.models.head import Head
from lowtide.models.layer import DecoderLayer
from lowtide.models.shape import DecoderShape

__all__ = ["PredictionInput", "Predictions", "prediction_loss"]


class PredictionInput(nn.Module):
    """What is around a prediction layer: its input, of hidden states and the next tokens, and the norm after it."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        width, eps = shape.hidden_size, shape.rms_norm_eps
        self.hidden_norm = nn.RMSNorm(width, eps=eps)
        self.embedding_norm = nn.RMSNorm(width, eps=eps)
        self.projection = nn.Linear(2 * width, width, bias=False)
        self.norm = nn.RMSNorm(width, eps=eps)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        projected: Tensor = self.projection(torch.cat((self.hidden_norm(hidden), self.embedding_norm(embedded)), -1))
        return projected


class Predictions(nn.Module):
    """The prediction layers, known by their numbers after those of the model. They share its embedding and head.

    The layers are by themselves in ``layers``, so that decisions by operator mean in them what they mean in others.

    Their targets are the tokens of the sequence itself, as far as it goes: what labels would leave out is not known
    here. Their loss is the mean over them, times the shape's factor, and reaches the gradient by itself.
    """

    def __init__(self, shape: DecoderShape, layers: dict[int, DecoderLayer]) -> None:
        super().__init__()
        self.inputs = nn.ModuleDict({str(number): PredictionInput(shape) for number in layers})
        self.layers = nn.ModuleDict({str(number): layer for number, layer in layers.items()})
        self.factor = shape.prediction_factor
        self.auxiliary = Auxiliary()

    def forward(
        self,
        hidden: Tensor,
        tokens: Tensor,
        rotary: Tensor,
        embedding: Callable[[Tensor], Tensor],
        head: Head,
    ) -> Tensor:
        """The loss, from the last layer's hidden states."""
        losses = []
        for depth, (number, layer) in enumerate(self.layers.items(), 1):
            around = self.inputs[number]
            assert isinstance(around, PredictionInput)
            if tokens.shape[1] <= depth + 1:
                break
            hidden = layer(around(hidden[:, :-1], embedding(tokens[:, depth:])), rotary)
            targets = tokens[:, depth + 1 :]
            losses.append(head.summed_loss(around.norm(hidden[:, :-1]), targets) / targets.numel())
        if not losses:
            return hidden.new_zeros(())
        return torch.stack(losses).mean() * self.factor


def prediction_loss(model: nn.Module) -> Tensor | None:
    """The sum of the prediction layers' loss over the micro-batches since the last reset; None if there is none."""
    for module in model.modules():
        if isinstance(module, Predictions):
            return module.auxiliary.value
    return None

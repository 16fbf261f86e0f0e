"""A causal language model, whole or the part of it that one pipeline stage holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lowtide.errors import ModelError
from lowtide.models.head import Head
from lowtide.models.layer import DecoderLayer
from lowtide.models.prediction import Predictions
from lowtide.models.rotary import rotary_table
from lowtide.models.shape import DecoderShape

__all__ = ["Decoder", "document_mask"]


def document_mask(documents: Tensor) -> Tensor:
    """What each token may look at, ``[batch, 1, sequence, sequence]``: what comes before it in its own document.

    >>> document_mask(torch.tensor([[0, 0, 1]])).int().tolist()
    [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]
    """
    same = documents.unsqueeze(-1) == documents.unsqueeze(-2)
    return same.tril().unsqueeze(1)


class Decoder(nn.Module):
    """Tokens in and logits out; a stage without embedding takes hidden states, one without head gives them.

    Layers are kept by their number in the whole model, so that parameters have the same names in every layout. For the
    same reason a last stage whose head or prediction layers use the embedding's weights has them under the embedding's
    name.
    """

    rotary: Tensor

    def __init__(
        self,
        shape: DecoderShape,
        layers: Mapping[int, DecoderLayer],
        *,
        first: bool = True,
        last: bool = True,
        predictions: Predictions | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.first = shape, first
        holds = first or predictions is not None or (last and shape.tie_word_embeddings)
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size) if holds else None
        self.layers = nn.ModuleDict({str(number): layer for number, layer in layers.items()})
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps) if last else None
        self.head = Head(shape) if last else None
        self.predictions = predictions
        self.first_position = 0
        """Of the tokens that this rank has; not 0 where others have those before."""
        self.register_buffer("rotary", rotary_table(shape), persistent=False)
        self.tie()

    if TYPE_CHECKING:

        def __call__(
            self,
            hidden: Tensor,
            positions: Tensor | None = None,
            documents: Tensor | None = None,
            labels: Tensor | None = None,
            tokens: Tensor | None = None,
        ) -> Tensor: ...

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        labels: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """``hidden`` is tokens ``[batch, sequence]`` on the first stage, hidden states on others.

        ``positions``, ``[batch, sequence]``, are given where they do not run from 0 on, ``documents``, the number of
        each token's document, where tokens look at those of their own only: of all tokens, also where a rank has some.
        With ``labels`` the last stage gives the sum of the tokens' losses in place of logits, which are then never
        held at once. A last stage with prediction layers needs the ``tokens``, unless it is the first too.
        """
        if self.first and self.embedding is not None:
            tokens = hidden
            if hidden.shape[1] > self.rotary.shape[1]:
                raise ModelError(
                    f"a sequence has {hidden.shape[1]} tokens and the model positions for {self.rotary.shape[1]}:"
                    " raise seq_length or max_position_embeddings of the model"
                )
            hidden = self.embedding(hidden)
        rotary = self.rotary[:, self.first_position :] if positions is None else self.rotary[:, positions]
        more = {} if documents is None else {"mask": document_mask(documents)}
        for layer in self.layers.values():
            hidden = layer(hidden, rotary, **more)
        last = hidden
        if self.norm is not None:
            hidden = self.norm(hidden)
        if self.head is None:
            return hidden
        output = self.head(hidden, labels=labels)
        if self.predictions is not None and self.embedding is not None and self.training:
            if positions is not None or documents is not None:
                raise ModelError("multi-token prediction goes over whole samples: give no positions and no documents")
            if tokens is None:
                raise ModelError("a last stage with multi-token prediction needs the tokens: give them as tokens=")
            loss = self.predictions(last, tokens, self.rotary, self.embedding, self.head)
            output = self.predictions.auxiliary.attach(output, loss)
        return output

    @property
    def all_layers(self) -> list[nn.Module]:
        """Its layers, those of multi-token prediction last."""
        return [*self.layers.values(), *(self.predictions.layers.values() if self.predictions is not None else ())]

    def make_buffers(self) -> None:
        """Fill what is computed from the shape; needed after ``to_empty``, which leaves it undefined."""
        with torch.no_grad():
            self.rotary.copy_(rotary_table(self.shape, torch.device("cpu")))
        for module in self.modules():
            make = getattr(module, "make_buffers", None)
            if module is not self and make is not None:
                make()

    def tie(self) -> None:
        """Let the head use the embedding's weights where the shape says so; needed again after ``to_empty``
        and after its parameters were replaced."""
        if self.shape.tie_word_embeddings and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight

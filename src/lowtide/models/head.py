"""The head: hidden states to logits, or at once to the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

from lowtide.models.chunked_loss import chunked_sum
from lowtide.models.shape import DecoderShape
from lowtide.models.sharded_loss import VocabularyShare, share_of, summed_cross_entropy

__all__ = ["Head"]


class Head(nn.Linear):
    """The projection onto the vocabulary.

    Under tensor parallel its weights are sharded over the vocabulary, and so are the logits that it gives where
    ``share`` says so.
    """

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__(shape.hidden_size, shape.vocab_size, bias=False)
        self.chunked = shape.head_loss == "chunked"
        """Whether the loss is computed in the head, with ``labels``."""
        self.share: VocabularyShare | None = None
        """The part of the vocabulary that the logits of this rank are of; None for all of it."""

    if TYPE_CHECKING:

        def __call__(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor: ...

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits; with ``labels``, the sum of the losses of all tokens, in chunks of them."""
        if labels is None:
            return super().forward(hidden)
        if not isinstance(hidden, DTensor):
            return chunked_sum(hidden, self.weight, labels)
        assert isinstance(self.weight, DTensor)
        mesh = hidden.device_mesh
        # Each rank's part of the vocabulary sends back a part of the hidden states' gradient.
        local = hidden.to_local(grad_placements=[Partial()])
        total = chunked_sum(local, self.weight.to_local(), labels, share=share_of(self.out_features, mesh))
        return DTensor.from_local(total, mesh, [Replicate()], run_check=False)

    def summed_loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The sum of the losses of all tokens."""
        if self.chunked:
            return self(hidden, labels=labels)
        return summed_cross_entropy(self(hidden), labels, self.share)

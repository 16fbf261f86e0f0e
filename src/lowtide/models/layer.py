"""One layer of a reference model: attention, then a feed-forward block, each added to the residual stream."""

from __future__ import annotations

from torch import Tensor, nn

from lowtide.models.shape import DecoderShape

__all__ = ["DecoderLayer"]


class DecoderLayer(nn.Module):
    """A layer. All layers of a model are of this class, whatever attention and feed-forward block they have."""

    def __init__(self, shape: DecoderShape, attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.attention = attention
        self.ffn_norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.feed_forward = feed_forward
        self.dropout = nn.Dropout(shape.hidden_dropout) if shape.hidden_dropout else None

    def forward(self, hidden: Tensor, rotary: Tensor, mask: Tensor | None = None) -> Tensor:
        more = {} if mask is None else {"mask": mask}
        hidden = hidden + self._dropped(self.attention(self.attention_norm(hidden), rotary, **more))
        return hidden + self._dropped(self.feed_forward(self.ffn_norm(hidden)))

    def _dropped(self, output: Tensor) -> Tensor:
        return output if self.dropout is None else self.dropout(output)

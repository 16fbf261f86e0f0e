"""Attention with heads of its own, several queries to a key where the shape says so."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowtide.models.context import ToHeads, ToTokens
from lowtide.models.rotary import RotaryEmbedding, attention_scale
from lowtide.models.shape import DecoderShape

__all__ = ["Attention", "attend"]


class Attention(nn.Module):
    """Grouped-query attention. The number of heads is that of the projections' outputs.

    Under tensor parallelism a rank's projections have some of the heads, and nothing here is different.
    """

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        width, head = shape.hidden_size, shape.head_dim
        self.head_dim, self.dropout, self.fused = head, shape.attention_dropout, shape.flash_attention
        self.scale = attention_scale(shape, head)
        self.wq = nn.Linear(width, shape.num_attention_heads * head, bias=shape.qkv_bias)
        self.wk = nn.Linear(width, shape.num_key_value_heads * head, bias=shape.qkv_bias)
        self.wv = nn.Linear(width, shape.num_key_value_heads * head, bias=shape.qkv_bias)
        self.wo = nn.Linear(shape.num_attention_heads * head, width, bias=shape.attention_bias)
        self.q_norm = nn.RMSNorm(head, eps=shape.rms_norm_eps) if shape.qk_norm else None
        self.k_norm = nn.RMSNorm(head, eps=shape.rms_norm_eps) if shape.qk_norm else None
        self.apply_rotary_emb = RotaryEmbedding(shape)
        self.to_heads: ToHeads | None = None
        self.to_tokens: ToTokens | None = None
        """Set both where ranks have some of the tokens each."""

    def forward(self, hidden: Tensor, rotary: Tensor, mask: Tensor | None = None) -> Tensor:
        queries, keys, values = (
            projection(hidden).unflatten(-1, (-1, self.head_dim)) for projection in (self.wq, self.wk, self.wv)
        )
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys = self.apply_rotary_emb(queries, keys, rotary)
        if self.to_heads is not None:
            queries, keys, values = self.to_heads(queries, keys, values)
        dropout = self.dropout if self.training else 0.0
        mixed = attend(queries, keys, values, self.scale, dropout=dropout, fused=self.fused, mask=mask)
        if self.to_tokens is not None:
            mixed = self.to_tokens(mixed)
        projected: Tensor = self.wo(mixed)
        return projected


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    *,
    dropout: float,
    fused: bool,
    mask: Tensor | None = None,
) -> Tensor:
    """Causal attention of ``[batch, sequence, heads, width]``, heads side by side in the result.

    ``mask``, ``[batch, 1, sequence, sequence]``, is what a token may look at, where that is not all before it.
    """
    queries, keys, values = (one.transpose(1, 2) for one in (queries, keys, values))
    grouped = queries.shape[1] != keys.shape[1]
    if fused:
        mixed = functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=dropout,
            scale=scale,
            enable_gqa=grouped,
        )
        return mixed.transpose(1, 2).flatten(-2)
    if grouped:
        times = queries.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(times, 1), values.repeat_interleave(times, 1)
    scores = queries.matmul(keys.transpose(-1, -2)) * scale
    hidden = (
        ~mask if mask is not None else torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    )
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1, dtype=torch.float32).to(values.dtype)
    if dropout:
        weights = functional.dropout(weights, dropout)
    return weights.matmul(values).transpose(1, 2).flatten(-2)

"""DeepSeek: latent attention, and routed and shared experts after the first few dense layers."""

from __future__ import annotations

from torch import nn

from lowtide.models.attention import Attention
from lowtide.models.feed_forward import FeedForward
from lowtide.models.latent import LatentAttention
from lowtide.models.layer import DecoderLayer
from lowtide.models.moe import MixtureOfExperts
from lowtide.models.shape import DecoderShape

__all__ = ["deepseek_layer"]


def deepseek_layer(shape: DecoderShape, number: int) -> DecoderLayer:
    """A layer; whether it is dense depends on its number."""
    attention: nn.Module = LatentAttention(shape, shape.latent) if shape.latent is not None else Attention(shape)
    width, fused = shape.hidden_size, shape.fused_swiglu
    feed_forward: nn.Module
    if shape.experts is None or shape.is_dense(number):
        feed_forward = FeedForward(width, shape.intermediate_size, fused=fused)
    else:
        feed_forward = MixtureOfExperts(shape.experts, width, fused=fused)
    return DecoderLayer(shape, attention, feed_forward)

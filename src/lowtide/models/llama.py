"""Llama: grouped-query attention and SwiGLU in every layer."""

from __future__ import annotations

from lowtide.models.attention import Attention
from lowtide.models.feed_forward import FeedForward
from lowtide.models.layer import DecoderLayer
from lowtide.models.shape import DecoderShape

__all__ = ["llama_layer"]


def llama_layer(shape: DecoderShape) -> DecoderLayer:
    """One dense layer."""
    feed_forward = FeedForward(shape.hidden_size, shape.intermediate_size, fused=shape.fused_swiglu)
    return DecoderLayer(shape, Attention(shape), feed_forward)

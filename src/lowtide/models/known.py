"""Shapes of models that people know by name, as their publishers describe them."""

from __future__ import annotations

import difflib

from lowtide.errors import ModelError
from lowtide.models.experts_shape import ExpertsShape
from lowtide.models.shape import DecoderShape, LatentShape, YarnShape

__all__ = ["SHAPES", "find_shape"]


def _llama3(hidden: int, layers: int, heads: int, inner: int) -> DecoderShape:
    return DecoderShape(
        vocab_size=128256,
        hidden_size=hidden,
        num_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=inner,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        max_position_embeddings=8192,
    )


SHAPES: dict[str, DecoderShape] = {
    "llama3-8b": _llama3(4096, 32, 32, 14336),
    "llama3-70b": _llama3(8192, 80, 64, 28672),
    "llama3-405b": _llama3(16384, 126, 128, 53248),
    "mixtral-8x7b": DecoderShape(
        vocab_size=32000,
        hidden_size=4096,
        num_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=14336,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
        max_position_embeddings=32768,
        experts=ExpertsShape(count=8, chosen=2, intermediate_size=14336, normalised=True, auxiliary=0.02),
    ),
    "qwen3-235b-a22b": DecoderShape(
        vocab_size=151936,
        hidden_size=4096,
        num_layers=94,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        intermediate_size=12288,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=40960,
        qk_norm=True,
        experts=ExpertsShape(count=128, chosen=8, intermediate_size=1536, normalised=True, auxiliary=0.001),
    ),
    "deepseek-v3": DecoderShape(
        vocab_size=129280,
        hidden_size=7168,
        num_layers=61,
        num_attention_heads=128,
        num_key_value_heads=128,
        head_dim=192,
        intermediate_size=18432,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=4096,
        yarn=YarnShape(
            factor=40.0, training_length=4096, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0
        ),
        latent=LatentShape(
            q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
        ),
        experts=ExpertsShape(
            count=256,
            chosen=8,
            intermediate_size=2048,
            shared=1,
            first_dense=3,
            groups=8,
            chosen_groups=4,
            scaling=2.5,
            normalised=True,
            scoring="sigmoid",
            auxiliary=0.0001,
            balancing="seq_aux_loss",
            bias=True,
        ),
    ),
}
"""By name. deepseek-v3 is without its layer for multi-token prediction."""


def find_shape(name: str) -> DecoderShape:
    """The shape of a name; ModelError with the nearest names if there is none.

    >>> find_shape("llama3-8b").num_layers
    32
    """
    if (found := SHAPES.get(name.lower())) is not None:
        return found
    close = difflib.get_close_matches(name.lower(), SHAPES, n=2, cutoff=0.4)
    meant = f"did you mean {' or '.join(close)}? There are" if close else "there are"
    raise ModelError(
        f"no model {name!r}: {meant} {', '.join(SHAPES)}; for another one give a directory with config.json,"
        " module:function, a training file or a Trace"
    )

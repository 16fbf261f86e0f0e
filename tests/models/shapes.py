"""Small shapes to try the reference models on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lowtide.models.build import build_model
from lowtide.models.decoder import Decoder
from lowtide.models.initialise import initialise
from lowtide.models.shape import DecoderShape

VOCABULARY, LENGTH = 48, 16


def llama(**changes: Any) -> DecoderShape:
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "max_position_embeddings": LENGTH,
    }  # fmt: skip
    return DecoderShape(**{**sizes, **changes})


def built(shape: DecoderShape, *, seed: int = 0) -> Decoder:
    model = build_model(shape)
    initialise(model, seed=seed)
    return model


def tokens(batch: int = 2, *, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())

"""Tiny models of transformers, unmodified, to try things on."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from lowtide.operators.survey import Survey, survey

__all__ = ["MODELS", "surveyed", "tiny"]

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL),
    "mistral": lambda: transformers.MistralConfig(**SMALL),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=8),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=3, n_head=4, use_cache=False, bos_token_id=1, eos_token_id=2
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4, experts_implementation="eager"),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16
    ),
}


def tiny(name: str, *, layers: int = 3, **sizes: int) -> nn.Module:
    """A tiny model of transformers, the same each time."""
    torch.manual_seed(0)
    config = MODELS[name]()
    for key, size in {"num_hidden_layers": layers, **sizes}.items():
        setattr(config, key, size)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config).train()
    return model


def surveyed(name: str, *, autocast: bool = False, layers: int = 3) -> tuple[Survey, nn.Module]:
    """A tiny model, and what one run of it with its own loss showed."""
    model = tiny(name, layers=layers)
    tokens = torch.randint(3, 64, (2, 8))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return survey(model, lambda: model(tokens, labels=tokens)), model

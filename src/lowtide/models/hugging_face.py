"""Any causal language model of ``transformers``, by its configuration directory."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor, nn

from lowtide.errors import ModelError
from lowtide.models.deferred import Deferred, build_deferred

__all__ = ["HuggingFaceDecoder", "build_hugging_face", "hugging_face_name"]

logger = logging.getLogger(__name__)

_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}


def hugging_face_name(name: str) -> str:
    """What the safetensors of a Llama on Hugging Face call a parameter of ours.

    >>> hugging_face_name("layers.3.attention.wq.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    module, _, kind = name.rpartition(".")
    if not module.startswith("layers."):
        return f"{_NAMES.get(module, module)}.{kind}"
    _, number, inner = module.split(".", 2)
    return f"model.layers.{number}.{_NAMES.get(inner, inner)}.{kind}"


def build_hugging_face(directory: str | Path, *, seed: int) -> tuple[HuggingFaceDecoder, Deferred | None]:
    """The model of a directory, and what fills its parameters, which are on meta until then.

    A model that cannot be built so is built on the host as it is; nothing needs to fill it. Every rank makes the same
    weights.
    """
    try:
        return build_deferred(lambda: HuggingFaceDecoder(directory), seed=seed)
    except ModelError:
        raise
    except Exception as error:  # its constructor reads values, which fake tensors do not have
        logger.warning(
            "%s is built whole on the host of every rank before it is sharded: %s: %s",
            *(directory, type(error).__name__, str(error).partition("\n")[0]),
        )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return HuggingFaceDecoder(directory), None


class HuggingFaceDecoder(nn.Module):
    """Tokens in, logits out, as the models of lowtide have it."""

    def __init__(self, directory: str | Path) -> None:
        super().__init__()
        try:
            import transformers
        except ImportError:
            raise ModelError(
                f"{directory} is a model of transformers, which is not installed; pip install 'lowtide[transformers]'"
            ) from None
        if not (Path(directory) / "config.json").is_file():
            raise ModelError(f"{directory} has no config.json; pretrained_model_dir is the directory that holds it")
        config = transformers.AutoConfig.from_pretrained(directory)
        config.use_cache = False
        self.model = transformers.AutoModelForCausalLM.from_config(config)
        self.vocabulary: int = config.vocab_size

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of every token."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits

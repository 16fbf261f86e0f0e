"""Tiny models for comparing runs bit by bit: two of our own and many of transformers, with and without dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["LAYERS", "MODELS", "VOCABULARY", "build", "stacks_of"]

VOCABULARY, WIDTH, HEADS = 48, 32, 4
DROPOUT = 0.2


class Norm(nn.Module):
    """Root mean square, in single precision, as models of this kind write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6))).to(x.dtype)


class Attention(nn.Module):
    """Grouped queries, rotary positions and a fused kernel."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wkv = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        batch, sequence, _ = x.shape
        queries = self.wq(x).view(batch, sequence, HEADS, -1).transpose(1, 2)
        keys, values = self.wkv(x).view(batch, sequence, HEADS, -1).transpose(1, 2).chunk(2, dim=1)
        queries, keys = rotate(queries, rotary), rotate(keys, rotary)
        keys, values = (one.repeat_interleave(2, dim=1) for one in (keys, values))
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.dropout(self.wo(mixed.transpose(1, 2).reshape(batch, sequence, -1)))


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = rotary
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat([-second, first], dim=-1) * sine


class FeedForward(nn.Module):
    """Gated, with one product for both halves."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(functional.dropout(functional.silu(gate) * value, self.dropout, self.training))


class Experts(nn.Module):
    """Four experts, two for each token: the tokens are put in the experts' order, and back."""

    COUNT, CHOSEN = 4, 2

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, self.COUNT, bias=False)
        self.experts = nn.ModuleList(FeedForward(dropout) for _ in range(self.COUNT))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = torch.topk(torch.softmax(self.router(tokens).float(), dim=-1), self.CHOSEN, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = torch.argsort(chosen.flatten(), stable=True)
        sizes = torch.bincount(chosen.flatten(), minlength=self.COUNT).tolist()
        pieces = tokens[order // self.CHOSEN].split(sizes)
        done = torch.cat([expert(piece) for expert, piece in zip(self.experts, pieces, strict=True)])
        unsorted = torch.zeros_like(done)
        unsorted[order] = done  # index_put_: a write into what a factory made
        mixed = unsorted.view(-1, self.CHOSEN, x.shape[-1]) * weights[..., None].to(done.dtype)
        return mixed.sum(1).view_as(x)


class Block(nn.Module):
    """One layer."""

    def __init__(self, feed_forward: Callable[[float], nn.Module], dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.attention = Norm(), Attention(dropout)
        self.feed_forward_norm, self.feed_forward = Norm(), feed_forward(dropout)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Reference(nn.Module):
    """A plain decoder whose head is its embedding."""

    def __init__(self, feed_forward: Callable[[float], nn.Module], dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(feed_forward, dropout) for _ in range(3))
        self.norm = Norm()
        steps = torch.outer(torch.arange(8.0), 0.1 ** torch.linspace(0, 2, WIDTH // HEADS // 2)).repeat(1, 2)
        self.register_buffer("cosine", steps.cos())
        self.register_buffer("sine", steps.sin())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, (self.cosine, self.sine))
        scores = functional.linear(self.norm(x), self.embedding.weight)
        return functional.cross_entropy(scores[:, :-1].reshape(-1, VOCABULARY).float(), tokens[:, 1:].reshape(-1))


class Causal(nn.Module):
    """A causal model of transformers and its own loss."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = transformers.AutoModelForCausalLM.from_config(config)

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens, labels=tokens).loss
        return loss


class Labelled(nn.Module):
    """Any other model of transformers; what it is given is made of the tokens."""

    def __init__(self, model: nn.Module, inputs: Callable[[Tensor], dict[str, Tensor]]) -> None:
        super().__init__()
        self.model, self.inputs = model, inputs

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(**self.inputs(tokens)).loss
        return loss


def of_text(tokens: Tensor) -> dict[str, Tensor]:
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def waves(tokens: Tensor, *shape: int) -> Tensor:
    """Numbers of that shape that follow from the tokens, as the pixels of an image or a spectrum would."""
    count = torch.Size(shape).numel() // tokens.shape[1]
    steps = torch.arange(count, device=tokens.device, dtype=torch.float32) + 1
    return torch.sin(tokens[..., None] * steps / 7).reshape(tokens.shape[0], *shape)


def of_image(tokens: Tensor) -> dict[str, Tensor]:
    return {"pixel_values": waves(tokens, 3, 16, 16), "labels": tokens[:, 0] % CLASSES}


def of_sound(tokens: Tensor) -> dict[str, Tensor]:
    return {"input_features": waves(tokens, 8, 32), "labels": tokens}


CLASSES = 4
SPECIAL: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, **SPECIAL,
}  # fmt: skip
GROUPED: dict[str, Any] = {**SMALL, "num_key_value_heads": 2}
EIGHTS: dict[str, Any] = {**GROUPED, "head_dim": 8}
BATCHED = {"experts_implementation": "batched_mm"}  # tide has no kernel for the histogram that grouping needs


def attention(dropout: float) -> dict[str, Any]:
    """With dropout the attention is written out, as the fused kernel has none."""
    return {"attention_dropout": dropout, "attn_implementation": "eager" if dropout else "sdpa"}


def llama(dropout: float) -> nn.Module:
    return Causal(transformers.LlamaConfig(**GROUPED, use_cache=False, **attention(dropout)))


def gpt2(dropout: float) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=HEADS, use_cache=False, bos_token_id=1, eos_token_id=2,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        attn_implementation="eager" if dropout else "sdpa",
    )  # fmt: skip
    return Causal(config)


def mixtral(dropout: float) -> nn.Module:
    """The loop over experts: what runs depends on the routing."""
    experts = {"num_local_experts": 4, "experts_implementation": "eager"}
    return Causal(transformers.MixtralConfig(**GROUPED, **experts, use_cache=False, **attention(dropout)))


def qwen3_moe(dropout: float) -> nn.Module:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, **BATCHED}
    return Causal(transformers.Qwen3MoeConfig(**EIGHTS, **experts, use_cache=CACHES, **attention(dropout)))


def deepseek(dropout: float) -> nn.Module:
    """A dense layer, and one with experts; latent attention."""
    config = transformers.DeepseekV3Config(
        **SMALL, num_key_value_heads=4, moe_intermediate_size=16, n_routed_experts=4, n_group=2, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4,
        qk_nope_head_dim=4, v_head_dim=8, use_cache=CACHES, **BATCHED, **attention(dropout),
    )  # fmt: skip
    return Causal(config)


def gpt_oss(dropout: float) -> nn.Module:
    """Sinks, a sliding window in every other layer, experts."""
    config = transformers.GptOssConfig(
        **EIGHTS, num_local_experts=4, num_experts_per_tok=2, sliding_window=4, attention_dropout=dropout,
        use_cache=CACHES, experts_implementation="eager",
    )  # fmt: skip
    return Causal(config)


def gemma(dropout: float) -> nn.Module:
    kinds = ["sliding_attention", "full_attention"]
    return Causal(
        transformers.Gemma3TextConfig(
            **EIGHTS, sliding_window=4, layer_types=kinds, use_cache=CACHES, **attention(dropout)
        )
    )  # fmt: skip


def mamba(dropout: float) -> nn.Module:
    config = transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, state_size=4, expand=2, use_cache=CACHES,
        **SPECIAL,
    )  # fmt: skip
    return Causal(config)


def rwkv(dropout: float) -> nn.Module:
    config = transformers.RwkvConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, attention_hidden_size=WIDTH, num_hidden_layers=2, use_cache=CACHES,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return Causal(config)


def bert(dropout: float) -> nn.Module:
    config = transformers.BertConfig(
        **SMALL, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        attn_implementation="eager" if dropout else "sdpa",
    )  # fmt: skip
    return Labelled(transformers.BertForMaskedLM(config), of_text)


def t5(dropout: float) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=48, num_layers=2, num_heads=HEADS, dropout_rate=dropout,
        decoder_start_token_id=0, pad_token_id=0, use_cache=CACHES,
    )  # fmt: skip
    return Labelled(transformers.T5ForConditionalGeneration(config), of_text)


def whisper(dropout: float) -> nn.Module:
    stacks = {
        f"{stack}_{name}": value
        for stack in ("encoder", "decoder")
        for name, value in {"layers": 2, "attention_heads": HEADS, "ffn_dim": 48}.items()
    }
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, d_model=WIDTH, num_mel_bins=8, max_source_positions=16, max_target_positions=32,
        decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None, dropout=dropout, use_cache=CACHES,
        **stacks, **SPECIAL,
    )  # fmt: skip
    return Labelled(transformers.WhisperForConditionalGeneration(config), of_sound)


def vit(dropout: float) -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=48, image_size=16,
        patch_size=4, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_labels=CLASSES,
    )  # fmt: skip
    return Labelled(transformers.ViTForImageClassification(config), of_image)


def convnext(dropout: float) -> nn.Module:
    config = transformers.ConvNextConfig(
        hidden_sizes=[16, WIDTH], depths=[1, 3], num_stages=2, patch_size=4, drop_path_rate=dropout,
        num_labels=CLASSES,
    )  # fmt: skip
    return Labelled(transformers.ConvNextForImageClassification(config), of_image)


CACHES = True
"""Most models keep keys and values unless asked not to, also in training; so do most families here."""

MODELS: dict[str, Callable[[float], nn.Module]] = {
    "reference": lambda dropout: Reference(FeedForward, dropout),
    "reference_moe": lambda dropout: Reference(Experts, dropout),
    "llama": llama,
    "gpt2": gpt2,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "deepseek": deepseek,
    "gpt_oss": gpt_oss,
    "gemma": gemma,
    "mamba": mamba,
    "rwkv": rwkv,
    "bert": bert,
    "t5": t5,
    "whisper": whisper,
    "vit": vit,
    "convnext": convnext,
}

LAYERS = {
    "reference": "layers",
    "reference_moe": "layers",
    "convnext": "model.convnext.encoder.stages.1.layers",
}
"""Where a model's layers are, if they are not to be looked for: there may be more experts than layers."""

STACKS = {
    "t5": ("model.encoder.block", "model.decoder.block"),
    "whisper": ("model.model.encoder.layers", "model.model.decoder.layers"),
}
"""Models with two stacks of layers, each of which is decided."""


def stacks_of(name: str) -> tuple[str | None, ...]:
    """Where the layers of a model are, stack by stack; None: they are found."""
    return STACKS.get(name, (LAYERS.get(name),))


def build(name: str, *, dropout: bool = False) -> nn.Module:
    """The model of that name, the same every time."""
    torch.manual_seed(0)
    return MODELS[name](DROPOUT if dropout else 0.0).train()

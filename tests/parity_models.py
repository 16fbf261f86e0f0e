"""Tiny models for comparing runs bit by bit: two of our own, three of transformers, with and without dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["LAYERS", "MODELS", "VOCABULARY", "build"]

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
    """A model of transformers and its own loss."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = transformers.AutoModelForCausalLM.from_config(config)

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens, labels=tokens).loss
        return loss


SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip


def attention(dropout: float) -> dict[str, Any]:
    """With dropout the attention is written out, as the fused kernel has none."""
    return {"attention_dropout": dropout, "attn_implementation": "eager" if dropout else "sdpa"}


MODELS: dict[str, Callable[[float], nn.Module]] = {
    "reference": lambda dropout: Reference(FeedForward, dropout),
    "reference_moe": lambda dropout: Reference(Experts, dropout),
    "llama": lambda dropout: Causal(transformers.LlamaConfig(**SMALL, **attention(dropout))),
    "gpt2": lambda dropout: Causal(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=HEADS, use_cache=False, bos_token_id=1,
            eos_token_id=2, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
            attn_implementation="eager" if dropout else "sdpa",
        )
    ),
    "mixtral": lambda dropout: Causal(
        # the loop over experts: what runs depends on the routing
        transformers.MixtralConfig(
            **SMALL, num_local_experts=4, experts_implementation="eager", **attention(dropout)
        )
    ),
}  # fmt: skip

LAYERS = {"reference": "layers", "reference_moe": "layers"}
"""Where a model's layers are, if they are not to be looked for: there may be more experts than layers."""


def build(name: str, *, dropout: bool = False) -> nn.Module:
    """The model of that name, the same every time."""
    torch.manual_seed(0)
    return MODELS[name](DROPOUT if dropout else 0.0).train()

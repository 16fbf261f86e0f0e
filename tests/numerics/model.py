"""A small Llama that every test of composition trains, and what a run of it leaves to compare."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HIDDEN, HEADS, VOCABULARY, LENGTH = 32, 64, 4, 48, 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        # The number of heads is left open: under tensor parallelism a rank has some of them.
        q, k, v = (w(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-5)
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class Llama(nn.Module):
    """An embedding, some layers, a norm and a head; a part of a pipeline leaves out what it does not have."""

    def __init__(self, layers: int = 3, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.norm: nn.Module | None = nn.RMSNorm(WIDTH, eps=1e-5)
        self.head: nn.Module | None = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) if self.embedding is not None else x
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) if self.head is not None and self.norm is not None else x


def build(layers: int = 3, *, dropout: float = 0.0) -> Llama:
    """The same weights every time."""
    torch.manual_seed(0)
    return Llama(layers, dropout=dropout).train()


def tokens_of(seed: int, batch: int = 2) -> Tensor:
    """The tokens of one step."""
    return torch.randint(VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


class Value(NamedTuple):
    """One value of a run: its name, and a digest of its bytes."""

    name: str
    digest: str


def values(step: Any, named: Iterable[tuple[str, Tensor | None]]) -> list[Value]:
    """The digests of some tensors; of a DTensor, of this rank's part."""
    return [Value(f"{step}: {name}", digest(tensor)) for name, tensor in named if tensor is not None]


def digest(tensor: Tensor) -> str:
    local = getattr(tensor, "to_local", lambda: tensor)()
    flat = local.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def gradients(model: nn.Module) -> list[tuple[str, Tensor | None]]:
    return [(name, parameter.grad) for name, parameter in model.named_parameters()]

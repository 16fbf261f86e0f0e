"""A small Llama: the model the tests train."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Shape:
    width: int = 64
    heads: int = 4
    key_heads: int = 2
    hidden: int = 128
    vocabulary: int = 96
    layers: int = 4
    sequence: int = 32
    batch: int = 2
    dropout: float = 0.0
    checkpointed: bool = False


def rotate(x: torch.Tensor) -> torch.Tensor:
    length, size = x.shape[-2], x.shape[-1]
    frequencies = 10000.0 ** (-torch.arange(0, size, 2, device=x.device).float() / size)
    angles = torch.outer(torch.arange(length, device=x.device).float(), frequencies)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        size = shape.width // shape.heads
        self.wq = nn.Linear(shape.width, shape.heads * size, bias=False)
        self.wk = nn.Linear(shape.width, shape.key_heads * size, bias=False)
        self.wv = nn.Linear(shape.width, shape.key_heads * size, bias=False)
        self.wo = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = self.shape.width // self.shape.heads

        def split(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(-1, (-1, size)).transpose(1, 2)

        q, k, v = rotate(split(self.wq(x))), rotate(split(self.wk(x))), split(self.wv(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.width, shape.hidden, bias=False)
        self.w3 = nn.Linear(shape.width, shape.hidden, bias=False)
        self.w2 = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.attention_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.feed_forward = FeedForward(shape)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        p = self.shape.dropout
        x = x + F.dropout(self.attention(self.attention_norm(x)), p, self.training and p > 0)
        return x + F.dropout(
            self.feed_forward(self.feed_forward_norm(x)), p, self.training and p > 0
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.shape.checkpointed:
            return checkpoint(self.run, x, use_reentrant=False)
        return self.run(x)


class Llama(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def build(shape: Shape, device: str, seed: int = 0) -> tuple[Llama, torch.Tensor]:
    """The same weights and tokens on every device."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Llama(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.05, generator=generator)
    tokens = torch.randint(shape.vocabulary, (shape.batch, shape.sequence), generator=generator)
    return model.to(device), tokens.to(device)


def step(model: Llama, optimizer, tokens: torch.Tensor, autocast: bool) -> torch.Tensor:
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
        loss = loss_of(model(tokens), tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def train(shape: Shape, device: str, steps: int = 5, autocast: bool = False):
    """Losses, and the parameters at the end on the host."""
    model, tokens = build(shape, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if device != "cpu":
        torch.get_device_module(device).manual_seed_all(7)
    losses = [step(model, optimizer, tokens, autocast).item() for _ in range(steps)]
    return losses, [p.detach().cpu().clone() for p in model.parameters()]

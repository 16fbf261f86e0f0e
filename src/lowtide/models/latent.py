"""Latent attention: keys and values, and perhaps queries, go through a narrow middle."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional

from lowtide.models.attention import attend
from lowtide.models.context import ToHeads, ToTokens
from lowtide.models.rotary import RotaryEmbedding, attention_scale
from lowtide.models.shape import DecoderShape, LatentShape

__all__ = ["LatentAttention"]


class LatentAttention(nn.Module):
    """A part of each query and key head has positions; that part of the keys is one for all heads."""

    def __init__(self, shape: DecoderShape, latent: LatentShape) -> None:
        super().__init__()
        self.latent = latent
        width, heads, eps = shape.hidden_size, shape.num_attention_heads, shape.rms_norm_eps
        self.dropout, self.fused = shape.attention_dropout, shape.flash_attention
        head = latent.qk_nope_head_dim + latent.qk_rope_head_dim
        self.scale = attention_scale(shape, head)
        rank = latent.q_lora_rank
        self.linear_q_down_proj = nn.Linear(width, rank, bias=False) if rank else None
        self.q_layernorm = nn.RMSNorm(rank, eps=eps) if rank else None
        self.linear_q_up_proj = nn.Linear(rank or width, heads * head, bias=False)
        self.linear_kv_down_proj = nn.Linear(width, latent.kv_lora_rank + latent.qk_rope_head_dim, bias=False)
        self.kv_layernorm = nn.RMSNorm(latent.kv_lora_rank, eps=eps)
        inner = heads * (latent.qk_nope_head_dim + latent.v_head_dim)
        self.linear_kv_up_proj = nn.Linear(latent.kv_lora_rank, inner, bias=False)
        self.linear_proj = nn.Linear(heads * latent.v_head_dim, width, bias=False)
        self.apply_rotary_emb = RotaryEmbedding(shape)
        self.tensor_mesh: DeviceMesh | None = None
        """Set it where ranks hold some of the heads each: they share the keys' positional part."""
        self.to_heads: ToHeads | None = None
        self.to_tokens: ToTokens | None = None
        """Set both where ranks have some of the tokens each."""

    def forward(self, hidden: Tensor, rotary: Tensor, mask: Tensor | None = None) -> Tensor:
        latent = self.latent
        plain, turning = latent.qk_nope_head_dim, latent.qk_rope_head_dim
        queries = hidden
        if self.linear_q_down_proj is not None and self.q_layernorm is not None:
            queries = self.q_layernorm(self.linear_q_down_proj(hidden))
        queries = self.linear_q_up_proj(queries).unflatten(-1, (-1, plain + turning))
        middle, shared = self.linear_kv_down_proj(hidden).split((latent.kv_lora_rank, turning), -1)
        keys, values = (
            self.linear_kv_up_proj(self.kv_layernorm(middle))
            .unflatten(-1, (-1, plain + latent.v_head_dim))
            .split((plain, latent.v_head_dim), -1)
        )
        if self.tensor_mesh is not None:
            # Each rank's heads send back a part of its gradient; together they are the whole.
            whole = DTensor.from_local(shared, self.tensor_mesh, [Replicate()], run_check=False)
            shared = whole.to_local(grad_placements=[Partial()])
        queries_plain, queries_turning = queries.split((plain, turning), -1)
        queries_turning, shared = self.apply_rotary_emb(queries_turning, shared.unsqueeze(-2), rotary)
        queries = torch.cat((queries_plain, queries_turning), -1)
        keys = torch.cat((keys, shared.expand(-1, -1, keys.shape[-2], -1)), -1)
        if self.to_heads is not None:
            queries, keys, values = self.to_heads(queries, keys, values)
        # The fused kernels want values as wide as keys.
        narrow = plain + turning - latent.v_head_dim if self.fused else 0
        if narrow > 0:
            values = functional.pad(values, (0, narrow))
        dropout = self.dropout if self.training else 0.0
        mixed = attend(queries, keys, values, self.scale, dropout=dropout, fused=self.fused, mask=mask)
        if narrow > 0:
            mixed = mixed.unflatten(-1, (-1, plain + turning))[..., : latent.v_head_dim].flatten(-2)
        if self.to_tokens is not None:
            mixed = self.to_tokens(mixed)
        projected: Tensor = self.linear_proj(mixed)
        return projected

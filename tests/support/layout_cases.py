"""Tiny models and the layouts they are trained in, each with the settings that a file writes for it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lowtide.train.data.megatron import write

__all__ = [
    "CONTEXT",
    "LAYOUTS",
    "MODELS",
    "ONE",
    "SHARD",
    "TENSOR",
    "WHOLE",
    "Layout",
    "Variant",
    "close",
    "data",
    "pipeline",
    "variants",
    "write_documents",
]

SAMPLES = 8
"""Samples of a step, in every layout."""

LLAMA = """
seed: 7
output_dir: ./output
use_legacy: true
model:
  model_config:
    vocab_size: 128
    hidden_size: 32
    num_layers: 4
    num_attention_heads: 4
    num_key_value_heads: 2
    intermediate_size: 64
    seq_length: 32
    params_dtype: float32
    compute_dtype: float32
"""
DEEPSEEK = """
seed: 7
output_dir: ./output
use_legacy: false
model:
  model_config:
    model_type: deepseek_v3
    vocab_size: 128
    hidden_size: 32
    num_layers: 4
    num_attention_heads: 4
    q_lora_rank: 16
    kv_lora_rank: 16
    qk_nope_head_dim: 8
    qk_rope_head_dim: 4
    v_head_dim: 8
    intermediate_size: 64
    moe_intermediate_size: 16
    n_routed_experts: 8
    num_experts_per_tok: 2
    n_shared_experts: 1
    first_k_dense_replace: 1
    n_group: 2
    topk_group: 1
    scoring_func: sigmoid
    norm_topk_prob: true
    routed_scaling_factor: 2.5
    moe_aux_loss_coeff: 0.001
    moe_router_load_balancing_type: seq_aux_loss
    moe_router_enable_expert_bias: true
    moe_router_bias_update_rate: 0.001
    seq_length: 32
    params_dtype: float32
    compute_dtype: float32
"""
SHARED = """
runner_config:
  epochs: 1
runner_wrapper:
  use_clip_grad: true
  max_grad_norm: 1.0
optimizer:
  type: AdamW
  betas: [0.9, 0.95]
  eps: 1.0e-8
  weight_decay: 0.1
lr_schedule:
  type: CosineWithWarmUpLR
  learning_rate: 1.0e-3
  warmup_steps: 4
train_dataset:
  data_loader:
    type: SyntheticDataLoader
    sizes: [160, 0, 0]
  shuffle: true
"""
MODELS = {"llama": LLAMA + SHARED, "deepseek": DEEPSEEK + SHARED}


class Layout(NamedTuple):
    """A layout: the degrees as a file writes them, and how many processes that makes."""

    name: str
    processes: int
    settings: dict[str, Any]
    only: str | None = None
    """The one model it is for; None for all."""


def close(found: Iterable[tuple[float, float]], expected: Iterable[tuple[float, float]]) -> None:
    """Losses and norms of two runs, step by step: the same up to the order of sums in single precision."""
    for (loss, norm), (other_loss, other_norm) in zip(found, expected, strict=True):
        assert abs(loss - other_loss) <= 1e-6 * abs(other_loss), (loss, other_loss)
        assert abs(norm - other_norm) <= 1e-5 * abs(other_norm), (norm, other_norm)


def data(ranks: int, micro_steps: int) -> dict[str, Any]:
    """The settings that make eight samples a step."""
    return {
        "parallel_config.data_parallel": ranks,
        "runner_config.batch_size": SAMPLES // ranks // micro_steps,
        "runner_config.gradient_accumulation_steps": micro_steps,
    }


def pipeline(ranks: int = 1) -> dict[str, Any]:
    """Two stages and four micro-batches."""
    return {
        "parallel_config.data_parallel": ranks,
        "parallel_config.pipeline_stage": 2,
        "parallel_config.micro_batch_num": 4,
        "runner_config.batch_size": SAMPLES // ranks // 4,
    }


SHARD = {"parallel.enable_parallel_optimizer": True}
TENSOR = {"parallel_config.model_parallel": 2}
CONTEXT = {"parallel_config.context_parallel": 2}
COMPILED = {"compile": True, "compile_backend": "aot_eager"}
ONE = Layout("one process", 1, data(1, 4))
LAYOUTS = (
    Layout("dp2", 2, data(2, 2)),
    Layout("fsdp2", 2, {**data(2, 2), **SHARD}),
    Layout("tp2", 2, {**data(1, 4), **TENSOR}),
    Layout("tp2 + sequence", 2, {**data(1, 4), **TENSOR, "parallel_config.use_seq_parallel": True}),
    Layout("pp2", 2, pipeline()),
    Layout("pp2 interleaved", 2, {**pipeline(), "model.model_config.pp_interleave_num": 2}),
    Layout("tp2 x fsdp2", 4, {**data(2, 2), **SHARD, **TENSOR}),
    Layout("pp2 x fsdp2", 4, {**pipeline(2), **SHARD}),
    Layout("ep2", 2, {**data(2, 2), **SHARD, "parallel_config.expert_parallel": 2}, only="deepseek"),
    Layout("ep2 x tp2", 4, {**data(2, 2), **SHARD, **TENSOR, "parallel_config.expert_parallel": 2}, only="deepseek"),
    Layout("cp2", 2, {**data(1, 4), **CONTEXT}, only="llama"),
    Layout("cp2 x fsdp2", 4, {**data(2, 2), **SHARD, **CONTEXT}, only="llama"),
    Layout("fsdp2, compiled layers", 2, {**data(2, 2), **SHARD, **COMPILED}, only="llama"),
)
WHOLE = Layout("batch 8", 1, data(1, 1))


class Variant(NamedTuple):
    """A model with something that a layout may get wrong, and the layouts it is trained in."""

    name: str
    model: str
    settings: dict[str, Any]
    layouts: tuple[Layout, ...]


def variants(documents: str) -> tuple[Variant, ...]:
    """Tied weights, multi-token prediction, and packed documents, which :func:`write_documents` writes."""
    named = {layout.name: layout for layout in LAYOUTS}
    tied = {"model.model_config.tie_word_embeddings": True}
    predicting = {"model.model_config.num_nextn_predict_layers": 1}
    again = {"reset_attention_mask": True, "reset_position_ids": True}
    config = {"data_path": [1, documents], "eod": 0, "seed": 1, **again}
    loader = {"type": "BlendedMegatronDatasetDataLoader", "sizes": None, "config": config}
    packed = {"train_dataset.data_loader": loader}
    return (
        Variant("llama tied", "llama", tied, (named["tp2"], named["pp2"])),
        Variant("deepseek mtp", "deepseek", predicting, (named["tp2"], named["pp2"], named["ep2"])),
        Variant("llama packed", "llama", packed, (named["tp2 + sequence"], named["fsdp2"])),
    )


def write_documents(prefix: Path, count: int = 1000) -> str:
    """Short documents in Megatron's form, each with its end."""
    random = np.random.default_rng(0)
    write(prefix, [[*random.integers(1, 64, int(random.integers(3, 12))), 0] for _ in range(count)])
    return str(prefix)

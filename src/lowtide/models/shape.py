"""The shape of a reference model, read from either layout of a training file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from lowtide.errors import ConfigError
from lowtide.models.experts_shape import ExpertsShape, experts_of

if TYPE_CHECKING:
    from lowtide.config.schema.model import ModelConfig
    from lowtide.config.schema.settings import Settings

__all__ = ["DecoderShape", "HeadLoss", "LatentShape", "YarnShape", "shape_of"]

HeadLoss: TypeAlias = Literal["whole", "sharded", "chunked"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentShape:
    """Latent attention: keys and values, and perhaps queries, go through a narrow middle."""

    q_lora_rank: int | None
    """The width of the middle of queries; None if queries are projected at once."""
    kv_lora_rank: int
    """The width of the middle of keys and values."""
    qk_nope_head_dim: int
    """The part of a query or key head without positions."""
    qk_rope_head_dim: int
    """The part of a query or key head with positions; in keys all heads share it."""
    v_head_dim: int
    """The width of a value head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnShape:
    """Positions stretched beyond their training length."""

    factor: float
    """How far they are stretched."""
    training_length: int
    """The length they were trained for."""
    beta_fast: float
    """Dimensions that turn more often than this over the training length are left as they are."""
    beta_slow: float
    """Dimensions that turn less often than this are stretched fully."""
    mscale: float
    """The factor on the tables."""
    mscale_all_dim: float
    """The factor on attention's scale; zero for none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderShape:
    """Everything a reference model is built from."""

    vocab_size: int
    """Tokens of the vocabulary."""
    hidden_size: int
    """The width of the residual stream."""
    num_layers: int
    """Layers of the model."""
    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int
    """Key and value heads."""
    head_dim: int
    """The width of a head."""
    intermediate_size: int
    """The inner width of a dense feed-forward block."""
    rms_norm_eps: float = 1e-5
    """Added to the mean square in norms."""
    rope_theta: float = 10000.0
    """The base of rotary positions."""
    max_position_embeddings: int = 4096
    """The positions the rotary table has: those of a training sequence, where the file says how long it is."""
    yarn: YarnShape | None = None
    """How positions are stretched; None if they are not."""
    tie_word_embeddings: bool = False
    """Whether the head uses the embedding's weights."""
    head_loss: HeadLoss = "sharded"
    """What is held of the logits: those of the whole vocabulary on each rank, those of each tensor-parallel rank's
    share of it, or a chunk of tokens at a time."""
    attention_dropout: float = 0.0
    """The dropout of attention weights."""
    hidden_dropout: float = 0.0
    """The dropout of each block's output."""
    initializer_range: float = 0.02
    """The standard deviation of fresh weights."""
    qkv_bias: bool = False
    """Whether query, key and value projections have a bias."""
    attention_bias: bool = False
    """Whether the output projection of attention has a bias too."""
    qk_norm: bool = False
    """Whether queries and keys are normalised, head by head."""
    flash_attention: bool = True
    """Whether attention is torch's fused call rather than its parts."""
    fused_rope: bool = False
    """Whether rotary positions are asked for as one kernel."""
    fused_swiglu: bool = False
    """Whether SwiGLU is asked for as one kernel."""
    latent: LatentShape | None = None
    """Latent attention; None for heads of their own."""
    experts: ExpertsShape | None = None
    """Routed experts; None for a dense model."""
    prediction_layers: int = 0
    """Multi-token-prediction layers after the last one."""
    prediction_factor: float = 0.3
    """The weight of their loss."""

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has a dense feed-forward block."""
        return self.experts is None or layer < self.experts.first_dense

    @property
    def embeds_twice(self) -> bool:
        """Whether what comes after the layers uses the embedding's weights as well."""
        return self.tie_word_embeddings or self.prediction_layers > 0

    @property
    def rotary_dim(self) -> int:
        """The width of a head that has positions."""
        return self.head_dim if self.latent is None else self.latent.qk_rope_head_dim


def shape_of(settings: Settings) -> DecoderShape:
    """The shape of the model that a training file describes; ConfigError if something is missing or cannot be built.

    ``shape = shape_of(check_file("pretrain_llama.yaml").settings)``
    """
    model = settings.model
    needed = ("vocab_size", "hidden_size", "num_layers", "num_attention_heads")
    if missing := [name for name in needed if getattr(model, name) is None]:
        place = "model.model_config" if settings.layout == "graph" else "model"
        raise ConfigError(
            f"{place} has no {', '.join(missing)}: a reference model is built from"
            f" {', '.join(needed)}; add what is missing, or name a model of transformers in pretrained_model_dir"
        )
    hidden, heads = _needed(model, "hidden_size"), _needed(model, "num_attention_heads")
    if model.hidden_act not in (None, "silu", "swiglu", "swish", "fusedswiglu"):
        raise ConfigError(f"hidden_act is {model.hidden_act!r}: the reference models have silu; remove it")
    latent = _latent(model)
    head_dim = model.head_dim or _head_dim(hidden, heads)
    groups = model.num_key_value_heads or heads
    if heads % groups and latent is None:
        raise ConfigError(
            f"num_attention_heads is {heads} and num_key_value_heads {groups}: each key head serves the same number of"
            " query heads, so the second must divide the first"
        )
    positions = model.seq_length or model.max_position_embeddings or 4096
    rotary_dim = head_dim if latent is None else latent.qk_rope_head_dim
    if rotary_dim % 2:
        raise ConfigError(f"a head has {rotary_dim} dimensions with positions: rotary positions need an even number")
    return DecoderShape(
        vocab_size=_needed(model, "vocab_size"),
        hidden_size=hidden,
        num_layers=_needed(model, "num_layers"),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        intermediate_size=model.intermediate_size or _inner_width(model, hidden),
        rms_norm_eps=model.rms_norm_eps or 1e-5,
        rope_theta=model.rope_theta or 10000.0,
        max_position_embeddings=positions,
        yarn=_yarn(model),
        tie_word_embeddings=bool(model.tie_word_embeddings),
        head_loss=model.head_loss,
        attention_dropout=model.attention_dropout,
        hidden_dropout=model.hidden_dropout,
        initializer_range=model.initializer_range or 0.02,
        qkv_bias=bool(model.add_qkv_bias or model.attention_bias),
        attention_bias=bool(model.attention_bias),
        qk_norm=bool(model.qk_layernorm),
        flash_attention=model.use_flash_attention is not False,
        fused_rope=bool(model.use_fused_rope),
        fused_swiglu=bool(model.use_fused_swiglu),
        latent=latent,
        experts=experts_of(settings),
        prediction_layers=model.num_nextn_predict_layers,
        prediction_factor=0.3 if model.mtp_loss_factor is None else model.mtp_loss_factor,
    )


def _needed(model: ModelConfig, name: str) -> int:
    value: int = getattr(model, name)
    return value


def _head_dim(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise ConfigError(
            f"hidden_size is {hidden} and num_attention_heads {heads}: the first is no multiple of the second;"
            " add head_dim, or change one of them"
        )
    return hidden // heads


def _inner_width(model: ModelConfig, hidden: int) -> int:
    """The inner width as Llama has it: two thirds of four times the width, stretched and rounded up."""
    width = int(2 * 4 * hidden / 3)
    if model.ffn_dim_multiplier is not None:
        width = int(model.ffn_dim_multiplier * width)
    step = model.multiple_of or 256
    return -(-width // step) * step


def _latent(model: ModelConfig) -> LatentShape | None:
    if model.kv_lora_rank is None:
        return None
    sizes: dict[str, Any] = {
        name: getattr(model, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    }
    if missing := [name for name, size in sizes.items() if size is None]:
        raise ConfigError(f"kv_lora_rank asks for latent attention, which also needs {', '.join(missing)}: add them")
    return LatentShape(q_lora_rank=model.q_lora_rank, kv_lora_rank=model.kv_lora_rank, **sizes)


def _yarn(model: ModelConfig) -> YarnShape | None:
    kind = (model.position_embedding_type or "rope").lower()
    if kind == "rope" and isinstance(model.scaling_factor, dict):
        raise ConfigError(
            "scaling_factor is a mapping: the reference models stretch positions by yarn only;"
            " write position_embedding_type: yarn with scaling_factor: a number"
        )
    if kind == "rope":
        return None
    if kind != "yarn":
        raise ConfigError(f"position_embedding_type is {kind!r}: the reference models have rope and yarn")
    if not isinstance(model.scaling_factor, (int, float)):
        raise ConfigError(f"position_embedding_type yarn needs scaling_factor, a number; found {model.scaling_factor}")
    return YarnShape(
        factor=float(model.scaling_factor),
        training_length=model.max_position_embeddings or 4096,
        beta_fast=model.beta_fast or 32.0,
        beta_slow=model.beta_slow or 1.0,
        mscale=1.0 if model.mscale is None else model.mscale,
        mscale_all_dim=0.0 if model.mscale_all_dim is None else model.mscale_all_dim,
    )

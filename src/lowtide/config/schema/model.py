"""The model: ``model.model_config``, and the flat ``model`` of the 2026 layout."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, SkipValidation

from lowtide.config.schema.field import (
    Count,
    Fraction,
    Free,
    Index,
    ListOf,
    NoEffect,
    NotNegative,
    Positive,
    Refused,
    Section,
)

__all__ = ["ModelConfig", "ModelSection"]

Type = Literal["float32", "float16", "bfloat16", "fp32", "fp16", "bf16"]

LAYOUT = "it describes the weight layout of the reference's checkpoints"
GENERATION = "it belongs to text generation"
ASCEND = "it belongs to Ascend kernels"
SPARSE = Refused("sparse attention with an index is not supported", "choose a model with dense attention")


class ModelConfig(Section):
    """The shape of the model, the pipeline stages of its layers, and its kernels."""

    aliases: ClassVar[dict[str, str]] = {
        "num_hidden_layers": "num_layers",
        "num_heads": "num_attention_heads",
        "n_kv_heads": "num_key_value_heads",
        "theta": "rope_theta",
        "num_experts": "n_routed_experts",
        "mtp_num_layers": "num_nextn_predict_layers",
        "mtp_loss_scaling_factor": "mtp_loss_factor",
        "param_init_type": "params_dtype",
        "qkv_has_bias": "add_qkv_bias",
        "apply_rope_fusion": "use_fused_rope",
        "bias_swiglu_fusion": "use_fused_swiglu",
        "moe_grouped_gemm": "use_gmm",
        "moe_permute_fusion": "use_fused_ops_permute",
        "use_pad_tokens": "enable_gmm_safe_tokens",
    }

    # Shape
    type: str | None = None
    """The reference's class of these settings, such as LlamaConfig; default: unset."""
    model_type: str | None = None
    """The family of the model, such as deepseek_v3; default: unset."""
    architectures: str | ListOf[str] | None = None
    """The class of the model, such as Qwen3ForCausalLM; default: unset."""
    batch_size: Count | None = None
    """Samples of one rank, where not given in `runner_config`; default: unset."""
    vocab_size: Count | None = None
    """Tokens of the vocabulary; default: the model's own."""
    hidden_size: Count | None = None
    """The width of the residual stream; default: the model's own."""
    num_layers: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Layers of the model; default: the model's own."""
    num_attention_heads: Count | None = None
    """Query heads; default: the model's own."""
    num_key_value_heads: Count | None = None
    """Key and value heads; default: as many as query heads."""
    intermediate_size: Count | None = None
    """The inner width of the feed-forward block; default: the model's own."""
    multiple_of: Count | None = None
    """The inner width is rounded up to a multiple of it; default: unset."""
    ffn_dim_multiplier: Positive | None = None
    """A factor on the inner width; default: unset."""
    head_dim: Count | None = None
    """The width of a head; default: hidden_size / num_attention_heads."""
    hidden_act: str | None = None
    """The activation function, such as silu; default: the model's own."""
    rms_norm_eps: Positive | None = None
    """Added to the variance in norms; default: the model's own."""
    max_position_embeddings: Count | None = None
    """The longest sequence the positions are made for; default: the model's own."""
    seq_length: Count | None = None
    """Tokens of a training sequence; default: the data set's."""
    tie_word_embeddings: bool | None = None
    """Whether the head uses the embedding's weights; default: the model's own."""
    attention_dropout: Fraction = 0.0
    """The dropout of attention weights; default 0."""
    hidden_dropout: Fraction = 0.0
    """The dropout of each block's output; default 0."""
    initializer_range: Positive | None = None
    """The standard deviation of fresh weights; default: the model's own."""
    ignore_token_id: Annotated[
        int, Refused("labels that are left out of the loss are -100", "write -100", when=lambda value: value != -100)
    ] = -100
    """The label that is left out of the loss; only -100 is supported; default -100."""

    # Positions and attention
    rope_theta: Positive | None = None
    """The base of rotary positions; default: the model's own."""
    position_embedding_type: str | None = None
    """The kind of positions, such as rope or yarn; default: the model's own."""
    scaling_factor: Positive | Free | None = None
    """How far positions are stretched beyond their training length; default: unset."""
    beta_fast: Positive | None = None
    """The upper bound of yarn's ramp; default: the model's own."""
    beta_slow: Positive | None = None
    """The lower bound of yarn's ramp; default: the model's own."""
    mscale: NotNegative | None = None
    """Yarn's factor on attention; default: the model's own."""
    mscale_all_dim: NotNegative | None = None
    """Yarn's factor on attention over all dimensions; default: the model's own."""
    q_lora_rank: Count | None = None
    """The rank of compressed queries in latent attention; default: not compressed."""
    kv_lora_rank: Count | None = None
    """The rank of compressed keys and values in latent attention; default: not compressed."""
    qk_nope_head_dim: Count | None = None
    """The part of a latent-attention head without positions; default: the model's own."""
    qk_rope_head_dim: Count | None = None
    """The part of a latent-attention head with positions; default: the model's own."""
    v_head_dim: Count | None = None
    """The width of a value head in latent attention; default: the model's own."""
    qk_layernorm: bool | None = None
    """Whether queries and keys are normalised; default: the model's own."""
    attention_bias: bool | None = None
    """Whether the projections of attention have a bias; default: the model's own."""
    add_qkv_bias: bool | None = None
    """Whether query, key and value projections have a bias; default: the model's own."""

    # Experts
    n_routed_experts: Count | None = None
    """Routed experts of a layer; default: a dense model."""
    num_experts_per_tok: Count | None = None
    """Experts each token is sent to; default: the model's own."""
    moe_intermediate_size: Count | None = None
    """The inner width of an expert; default: the model's own."""
    n_shared_experts: Index | None = None
    """Experts that see every token; default: the model's own."""
    first_k_dense_replace: Index | None = None
    """First layers that stay dense; default: the model's own."""
    n_group: Count | None = None
    """Groups that the experts are split into; default: the model's own."""
    topk_group: Count | None = None
    """Groups a token may choose from; default: the model's own."""
    routed_scaling_factor: Positive | None = None
    """A factor on the routed experts' sum; default: the model's own."""
    norm_topk_prob: bool | None = None
    """Whether the chosen experts' weights sum to one; default: the model's own."""
    scoring_func: str | None = None
    """How the router scores, softmax or sigmoid; default: the model's own."""
    moe_aux_loss_coeff: NotNegative | ListOf[NotNegative] | None = None
    """The weight of the load-balancing loss; default: the model's own."""
    moe_router_load_balancing_type: str | ListOf[str] | None = None
    """How load is balanced, such as seq_aux_loss; default: the model's own."""
    moe_router_enable_expert_bias: bool | None = None
    """Whether a bias on the scores balances load; default: the model's own."""
    moe_router_bias_update_rate: NotNegative | None = None
    """How fast that bias moves; default: the model's own."""
    moe_token_drop_policy: str | None = None
    """Which tokens are dropped beyond an expert's capacity; default: none."""
    moe_z_loss_coeff: NotNegative | None = None
    """The weight of the loss on large router scores; default: the model's own."""
    moe_token_dispatcher_type: Annotated[str, NoEffect("tokens are sent by torch's all-to-all")] | None = None
    """How the reference sends tokens to experts; default: unset."""
    npu_nums_per_device: Annotated[Count, NoEffect(ASCEND, harmless=(1,))] = 1
    """Devices of one node in the reference's dispatcher; default 1."""
    num_nextn_predict_layers: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Multi-token-prediction layers after the last one; default 0."""
    mtp_loss_factor: NotNegative | None = None
    """The weight of the multi-token-prediction loss; default: the model's own."""

    # Loss
    head_loss: Literal["whole", "sharded", "chunked"] = "sharded"
    """What a rank holds of the logits: those of the whole vocabulary, of its tensor-parallel share of it, or of a chunk
    of tokens at a time, whose loss and gradients are computed in forward; a key of lowtide's own; default sharded,
    which is whole without tensor parallel."""

    # Types
    params_dtype: Type | None = None
    """The type of parameters; default: the model's own."""
    compute_dtype: Type | None = None
    """The type of matrix products; default: the model's own."""
    layernorm_compute_dtype: Type | None = None
    """The type inside norms; default: the model's own."""
    softmax_compute_dtype: Type | None = None
    """The type inside softmax; default: the model's own."""
    rotary_dtype: Type | None = None
    """The type of rotary positions; default: the model's own."""
    router_dense_type: Type | None = None
    """The type of the router's product; default: the model's own."""
    fp32_residual_connection: Annotated[
        bool, Refused("the residual stream keeps its type", "write false, or params_dtype: float32")
    ] = False
    """Whether the residual stream is kept in float32; only false is supported; default false."""

    # Placement
    offset: SkipValidation[int | list[int] | list[list[int]]] = 0
    """Layers more (or fewer) than the even share: a number, one per stage, or one list per interleave; default 0."""
    pp_interleave_num: Annotated[int, Field(ge=1, le=1024)] = 1
    """Chunks of layers on each pipeline stage; default 1."""
    start_stage: Annotated[int, Field(ge=0, le=65_536)] = 0
    """The first pipeline stage of this model, with `stage_num`; default 0."""
    stage_num: Annotated[int, Field(ge=0, le=65_536)] = 0
    """The pipeline stages of this model; 0 for all; default 0."""

    # Kernels
    use_flash_attention: bool | None = None
    """Whether the fused attention kernel is used; default: where it exists."""
    use_fused_rope: bool | None = None
    """Whether rotary positions are one kernel; default: where it exists."""
    use_fused_swiglu: bool | None = None
    """Whether SwiGLU is one kernel; default: where it exists."""
    use_gmm: bool | None = None
    """Whether all experts of a device are one grouped product; default: where it exists."""
    use_fused_ops_permute: bool | None = None
    """Whether tokens are sorted by expert in one kernel; default: where it exists."""
    use_fused_ops_topkrouter: bool | None = None
    """Whether the router's choice is one kernel; default: where it exists."""
    enable_gmm_safe_tokens: Annotated[bool, NoEffect("the grouped product takes experts without tokens")] | None = None
    """Whether each expert gets at least one token; not needed here; default: unset."""

    # Accepted without effect
    qkv_concat: Annotated[bool, NoEffect(LAYOUT, harmless=(False,))] = False
    """Whether query, key and value weights are one tensor; default false."""
    mla_qkv_concat: Annotated[bool, NoEffect(LAYOUT, harmless=(False,))] = False
    """Whether latent attention's weights are one tensor; default false."""
    mlp_concat: Annotated[bool, NoEffect(LAYOUT, harmless=(False,))] = False
    """Whether the feed-forward block's first weights are one tensor; default false."""
    use_contiguous_weight_layout_attention: Annotated[bool, NoEffect(LAYOUT, harmless=(False,))] = False
    """Whether heads lie contiguously in attention's weights; default false."""
    input_sliced_sig: Annotated[bool, NoEffect("labels are shifted by the data set")] | None = None
    """Whether inputs arrive already shifted; default: unset."""
    use_attn_mask_compression: Annotated[bool, NoEffect(ASCEND, harmless=(False,))] = False
    """Whether the reference compresses its causal mask; default false."""
    checkpoint_name_or_path: Annotated[str, NoEffect("use `load_checkpoint`", harmless=("",))] | None = None
    """Weights the reference loads with the model; default: unset."""
    use_past: Annotated[bool, NoEffect(GENERATION, harmless=(False,))] = False
    """Whether keys and values of earlier tokens are kept; default false."""
    bos_token_id: Annotated[int | ListOf[int], NoEffect(GENERATION)] | None = None
    """The token that begins a text; default: unset."""
    eos_token_id: Annotated[int | ListOf[int], NoEffect(GENERATION)] | None = None
    """The token that ends a text; default: unset."""
    pad_token_id: Annotated[int, NoEffect(GENERATION)] | None = None
    """The token that fills a text; default: unset."""
    max_decode_length: Annotated[int, NoEffect(GENERATION)] | None = None
    """The longest generated text; default: unset."""
    max_new_tokens: Annotated[int, NoEffect(GENERATION)] | None = None
    """The most tokens generated; default: unset."""
    repetition_penalty: Annotated[float, NoEffect(GENERATION)] | None = None
    """The penalty for repeated tokens; default: unset."""
    top_k: Annotated[int, NoEffect(GENERATION)] | None = None
    """Tokens sampled from; default: unset."""
    top_p: Annotated[float, NoEffect(GENERATION)] | None = None
    """The probability sampled from; default: unset."""
    do_sample: Annotated[bool, NoEffect(GENERATION)] | None = None
    """Whether tokens are sampled; default: unset."""
    block_size: Annotated[int, NoEffect(GENERATION)] | None = None
    """Tokens of a block of paged attention; default: unset."""
    num_blocks: Annotated[int, NoEffect(GENERATION)] | None = None
    """Blocks of paged attention; default: unset."""
    is_dynamic: Annotated[bool, NoEffect(GENERATION, harmless=(False,))] = False
    """Whether shapes change in generation; default false."""

    # Refused
    fine_grain_interleave: Annotated[
        Count,
        Refused(
            "interleaving parts of a batch inside a layer is not supported",
            "remove it, or write 1",
            when=lambda value: value > 1,
        ),
    ] = 1
    """Parts of a batch whose computing and sending overlap inside a layer; only 1 is supported; default 1."""
    use_3d_tensor_parallel: Annotated[
        bool, Refused("three-dimensional tensor parallel is not supported", "use `parallel_config.model_parallel`")
    ] = False
    """Whether weights are sharded in three dimensions; only false is supported; default false."""
    quantization_bit: Annotated[
        int,
        Refused("quantized weights are not supported in training", "write 0", when=lambda value: value > 0),
    ] = 0
    """Bits of quantized weights; only 0 is supported; default 0."""
    pet_config: (
        Annotated[
            Free,
            Refused("adapters such as LoRA are not supported", "remove the section to train all weights"),
        ]
        | None
    ) = None
    """Settings of an adapter such as LoRA; not supported; default: none."""
    index_n_heads: Annotated[int, SPARSE] | None = None
    """Heads of the index of sparse attention; not supported; default: unset."""
    index_head_dim: Annotated[int, SPARSE] | None = None
    """The width of those heads; not supported; default: unset."""
    index_topk: Annotated[int, SPARSE] | None = None
    """Tokens the index of sparse attention chooses; not supported; default: unset."""


class ModelSection(Section):
    """The model of the graph layout."""

    config: ModelConfig = Field(alias="model_config", default_factory=ModelConfig.model_construct)
    """The shape of the model, the pipeline stages of its layers, and its kernels."""
    arch: Free | None = None
    """The reference's class of the model, in `type`; default: unset."""

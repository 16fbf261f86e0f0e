"""Mixture of experts in the graph layout: ``moe_config``."""

from typing import Annotated, ClassVar, Literal

from lowtide.config.schema.field import Count, Fraction, Index, ListOf, NoEffect, NotNegative, Positive, Section

__all__ = ["MoEConfig"]

ASCEND = "it belongs to the reference's way of sending tokens on Ascend"
MOVING = "experts are not moved between devices"


class MoEConfig(Section):
    """Experts, their router and its losses."""

    unknown: ClassVar[Literal["error", "warn"]] = "error"
    aliases: ClassVar[dict[str, str]] = {
        "moe_grouped_gemm": "use_gmm",
        "use_pad_tokens": "enable_gmm_safe_tokens",
        "moe_permute_fusion": "use_fused_ops_permute",
    }

    expert_num: Count = 1
    """Routed experts of a layer; default 1, a dense layer."""
    num_experts_chosen: Count = 1
    """Experts each token is sent to; default 1."""
    capacity_factor: float = 1.1
    """Tokens an expert takes, as a multiple of the even share; zero or less for all; default 1.1."""
    aux_loss_factor: NotNegative = 0.05
    """The weight of the load-balancing loss; default 0.05."""
    aux_loss_factors: ListOf[NotNegative] | None = None
    """The weights of several load-balancing losses, in the order of `aux_loss_types`; default: unset."""
    aux_loss_types: ListOf[str] | None = None
    """The kinds of load-balancing losses: expert, device, comm; default: unset."""
    z_loss_factor: NotNegative = 0.0
    """The weight of the loss on large router scores; default 0."""
    routing_policy: str = "TopkRouterV1"
    """The router, such as TopkRouterV2; default TopkRouterV1."""
    norm_topk_prob: bool = True
    """Whether the chosen experts' weights sum to one; default true."""
    use_gating_sigmoid: bool = False
    """Whether the router scores with a sigmoid instead of softmax; default false."""
    router_dense_type: Literal["float32", "float16", "bfloat16"] = "float32"
    """The type of the router's product; default float32."""
    shared_expert_num: Index = 0
    """Experts that see every token; default 0."""
    use_shared_expert_gating: bool = False
    """Whether a gate weighs the shared experts; default false."""
    topk_method: str = "greedy"
    """How experts are chosen, such as group_limited_greedy; default greedy."""
    n_group: Count | None = None
    """Groups that the experts are split into; default: one."""
    topk_group: Count | None = None
    """Groups a token may choose from; default: all."""
    first_k_dense_replace: Index | bool | None = None
    """First layers that stay dense; default: none."""
    moe_intermediate_size: Count | None = None
    """The inner width of an expert; default: the model's."""
    routed_scaling_factor: Positive = 1.0
    """A factor on the routed experts' sum; default 1."""
    balance_via_topk_bias: bool = False
    """Whether a bias on the scores balances load; default false."""
    topk_bias_update_rate: NotNegative = 0.0
    """How fast that bias moves; default 0."""
    enable_sdrop: bool = False
    """Whether tokens are dropped by sequence position, earlier ones first kept; default false."""
    callback_moe_droprate: bool = False
    """Whether the share of dropped tokens is logged; needs the callback MoEDropRateCallback; default false."""
    use_gmm: bool = False
    """Whether all experts of a device are one grouped product; default false."""
    enable_gmm_safe_tokens: bool = False
    """Whether each expert gets at least one token; the grouped product here needs none; default false."""
    use_fused_ops_permute: bool = False
    """Whether tokens are sorted by expert in one kernel; default false."""
    use_fused_ops_topkrouter: bool = False
    """Whether the router's choice is one kernel; default false."""
    comp_comm_parallel: Annotated[bool, NoEffect(ASCEND, harmless=(False,))] = False
    """Whether computing and sending of parts overlap; default false."""
    comp_comm_parallel_degree: Annotated[Count, NoEffect(ASCEND, harmless=(2,))] = 2
    """Parts that overlap; default 2."""
    group_wise_a2a: Annotated[bool, NoEffect(ASCEND, harmless=(False,))] = False
    """Whether tokens are sent within groups first; default false."""
    expert_group_size: Annotated[Count, NoEffect(ASCEND)] | None = None
    """Experts of one group of devices; default: unset."""
    save_token_distribution: Annotated[bool, NoEffect(MOVING, harmless=(False,))] = False
    """Whether the load of experts is written to a file; default false."""
    enable_cold_hot_expert: Annotated[bool, NoEffect(MOVING, harmless=(False,))] = False
    """Whether often used experts are copied to all devices; default false."""
    hot_expert_num: Annotated[Index, NoEffect(MOVING, harmless=(0,))] = 0
    """Experts that are copied; default 0."""
    cold_token_percent: Annotated[Fraction, NoEffect(MOVING, harmless=(1.0, 1))] = 1.0
    """The share of tokens the other experts take; default 1."""
    update_step: Annotated[Count, NoEffect(MOVING)] | None = None
    """Steps between two choices of copied experts; default: unset."""
    moe_module_name: Annotated[str, NoEffect(MOVING, harmless=("",))] = ""
    """The module whose experts are copied; default empty."""
    dispatch_global_max_bs: Annotated[Index, NoEffect(ASCEND, harmless=(0,))] = 0
    """The largest batch of the reference's dispatcher; default 0."""
    enable_deredundency: Annotated[bool, NoEffect(ASCEND, harmless=(False,))] = False
    """Whether copies of a token are sent to a node once; default false."""
    npu_nums_per_device: Annotated[Count, NoEffect(ASCEND, harmless=(1,))] = 1
    """Devices of one node; default 1."""
    use_allgather_dispatcher: Annotated[bool, NoEffect(ASCEND, harmless=(False,))] = False
    """Whether tokens are gathered instead of exchanged; default false."""
    moe_shared_expert_overlap: Annotated[bool, NoEffect(ASCEND, harmless=(False,))] = False
    """Whether shared experts compute while tokens are sent; default false."""

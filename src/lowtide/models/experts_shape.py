"""The shape of a mixture of experts, read from the model's settings or from the older ``moe_config``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from lowtide.errors import ConfigError

if TYPE_CHECKING:
    from lowtide.config.schema.settings import Settings

__all__ = ["ExpertsShape", "experts_of"]

Scoring = Literal["softmax", "sigmoid"]
Balancing = Literal["aux_loss", "seq_aux_loss", "none"]
DropPolicy = Literal["position", "probs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsShape:
    """Routed experts, their router and its losses."""

    count: int
    """Routed experts of a layer."""
    chosen: int
    """Experts each token is sent to."""
    intermediate_size: int
    """The inner width of an expert."""
    shared: int = 0
    """Experts that see every token; they are built as one of that many times the width."""
    first_dense: int = 0
    """First layers that stay dense."""
    groups: int = 1
    """Groups that the experts are split into."""
    chosen_groups: int = 1
    """Groups a token may choose from."""
    scaling: float = 1.0
    """A factor on the routed experts' sum."""
    normalised: bool = False
    """Whether the chosen experts' weights sum to one."""
    scoring: Scoring = "softmax"
    """How the router scores."""
    auxiliary: float = 0.0
    """The weight of the load-balancing loss."""
    balancing: Balancing = "aux_loss"
    """Over what load is balanced: all tokens of a micro-batch, or each sequence by itself."""
    z_loss: float = 0.0
    """The weight of the loss on large router scores."""
    bias: bool = False
    """Whether a bias on the scores balances load."""
    bias_rate: float = 0.001
    """How far that bias moves in a step."""
    capacity: float | None = None
    """Slots an expert takes, as a multiple of the even share of a rank's micro-batch; None for all."""
    drop_policy: DropPolicy = "position"
    """Which slots an expert keeps when it has too many: the first ones, or those with the highest scores."""
    grouped: bool | None = None
    """Whether all experts are one grouped product: True and None where that is faster, False never."""


Value = TypeVar("Value")


def experts_of(settings: Settings) -> ExpertsShape | None:
    """The experts that a training file describes; None for a dense model."""
    model = settings.model
    older = settings.moe_config if "moe_config" in settings.present else None
    count = model.n_routed_experts or (older.expert_num if older is not None else 1)
    if count <= 1 and model.n_routed_experts is None:
        return None

    def from_older(name: str) -> Any:
        return getattr(older, name) if older is not None else None

    def either(newer: Value | None, in_older: Value | None, default: Value) -> Value:
        return next((value for value in (newer, in_older) if value is not None), default)

    chosen = either(model.num_experts_per_tok, from_older("num_experts_chosen"), 1)
    groups = either(model.n_group, from_older("n_group"), 1)
    chosen_groups = either(model.topk_group, from_older("topk_group"), groups)
    _check_choice(count, chosen, groups, chosen_groups)
    width = either(model.moe_intermediate_size, from_older("moe_intermediate_size"), model.intermediate_size)
    if width is None:
        raise ConfigError("a model with experts needs moe_intermediate_size, the inner width of one: add it")
    scoring = model.scoring_func or ("sigmoid" if older is not None and older.use_gating_sigmoid else "softmax")
    if scoring not in ("softmax", "sigmoid"):
        raise ConfigError(f"scoring_func is {scoring!r}: the router scores with softmax or sigmoid")
    if older is not None and older.use_shared_expert_gating:
        raise ConfigError("moe_config.use_shared_expert_gating: the reference models have no gate there; remove it")
    auxiliary, balancing = _auxiliary(settings)
    drop_policy = model.moe_token_drop_policy
    if drop_policy not in (None, "position", "probs"):
        raise ConfigError(f"moe_token_drop_policy is {drop_policy!r}: expected position or probs")
    grouped = model.use_gmm if model.use_gmm is not None else (older.use_gmm if older is not None else None)
    return ExpertsShape(
        count=count,
        chosen=chosen,
        intermediate_size=width,
        shared=either(model.n_shared_experts, from_older("shared_expert_num"), 0),
        first_dense=int(either(model.first_k_dense_replace, from_older("first_k_dense_replace"), 0)),
        groups=groups,
        chosen_groups=chosen_groups,
        scaling=either(model.routed_scaling_factor, from_older("routed_scaling_factor"), 1.0),
        normalised=either(model.norm_topk_prob, from_older("norm_topk_prob"), False),
        scoring="sigmoid" if scoring == "sigmoid" else "softmax",
        auxiliary=auxiliary,
        balancing=balancing,
        z_loss=either(model.moe_z_loss_coeff, from_older("z_loss_factor"), 0.0),
        bias=either(model.moe_router_enable_expert_bias, from_older("balance_via_topk_bias"), False),
        bias_rate=either(model.moe_router_bias_update_rate, from_older("topk_bias_update_rate"), 0.001),
        capacity=_capacity(settings, grouped=bool(grouped)),
        drop_policy="probs" if drop_policy == "probs" else "position",
        grouped=grouped,
    )


def _check_choice(count: int, chosen: int, groups: int, chosen_groups: int) -> None:
    if chosen > count:
        raise ConfigError(f"each token chooses {chosen} of {count} experts: choose at most as many as there are")
    if count % groups:
        raise ConfigError(f"n_group is {groups}, which does not divide the {count} experts: choose a divisor")
    if chosen_groups > groups:
        raise ConfigError(f"topk_group is {chosen_groups} of {groups} groups: choose at most as many as there are")
    if chosen > chosen_groups * (count // groups):
        raise ConfigError(
            f"each token chooses {chosen} experts out of {chosen_groups} groups of {count // groups}:"
            " there are not as many; raise topk_group, or lower num_experts_per_tok"
        )


def _capacity(settings: Settings, *, grouped: bool) -> float | None:
    """The capacity factor, where tokens are dropped at all: the grouped product takes all of them."""
    older = settings.moe_config if "moe_config" in settings.present else None
    if settings.model.moe_token_drop_policy is None and (older is None or grouped):
        return None
    factor = settings.moe_config.capacity_factor
    return factor if factor > 0 else None


def _auxiliary(settings: Settings) -> tuple[float, Balancing]:
    """The weight of the load-balancing loss and what it is taken over."""
    model = settings.model
    older = settings.moe_config if "moe_config" in settings.present else None
    kinds = model.moe_router_load_balancing_type
    weights = model.moe_aux_loss_coeff
    if weights is None and older is not None:
        factors, types = older.aux_loss_factors, older.aux_loss_types
        if types is not None and types != ["expert"]:
            raise ConfigError(f"moe_config.aux_loss_types is {types}: only 'expert' is supported; remove the others")
        weights = factors if factors is not None else older.aux_loss_factor
    kind_list = kinds if isinstance(kinds, list) else [kinds] if kinds is not None else ["aux_loss"]
    weight_list = weights if isinstance(weights, list) else [0.0 if weights is None else weights]
    if len(kind_list) != 1 or len(weight_list) != 1:
        raise ConfigError(
            f"moe_router_load_balancing_type is {kinds} with moe_aux_loss_coeff {weights}: one load-balancing loss is"
            " supported; name one"
        )
    kind = {"sub_seq_aux_loss": "seq_aux_loss"}.get(kind_list[0].lower(), kind_list[0].lower())
    if kind == "aux_loss":
        return float(weight_list[0]), "aux_loss"
    if kind == "seq_aux_loss":
        return float(weight_list[0]), "seq_aux_loss"
    if kind == "none":
        return 0.0, "none"
    raise ConfigError(f"moe_router_load_balancing_type is {kind_list[0]!r}: expected aux_loss, seq_aux_loss or none")

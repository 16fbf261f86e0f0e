"""What a file says about a model of transformers: its directory decides, and the file must not contradict it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowtide.errors import ConfigError

if TYPE_CHECKING:
    from lowtide.config.schema import Settings

__all__ = ["keys_without_effect", "refuse_contradictions"]

_KERNELS = ("use_flash_attention", "use_fused_rope", "use_fused_swiglu", "use_gmm")
_SAME = {"num_layers": ("num_hidden_layers", "n_layer"), "num_attention_heads": ("num_attention_heads", "n_head")}
"""Keys that a configuration of transformers has under another name."""
_SHAPE = (
    "vocab_size", "hidden_size", "num_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "head_dim", "hidden_act", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "attention_dropout",
    "hidden_dropout", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "first_k_dense_replace",
    "n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob", "scoring_func", "moe_aux_loss_coeff",
    "moe_router_enable_expert_bias", "moe_token_drop_policy", "moe_z_loss_coeff", "attention_bias", "qk_layernorm",
)  # fmt: skip
"""Keys that change what is trained."""


def refuse_contradictions(settings: Settings) -> None:
    """ConfigError if the file asks for another model than ``pretrained_model_dir`` has; nothing without one."""
    directory = settings.top_level.pretrained_model_dir
    if not directory:
        return
    config = _config(directory)
    wrong = [
        f"{key} is {value} and {name} of the directory {config[name]}"
        for key, value in _written(settings, _SHAPE).items()
        for name in _SAME.get(key, (key,))
        if name in config and config[name] != value
    ]
    wrong += [
        f"{key} is {value}, and the directory's config.json has no such key"
        for key, value in _written(settings, _SHAPE).items()
        if config and not any(name in config for name in _SAME.get(key, (key,)))
    ]
    if settings.model.num_nextn_predict_layers:
        wrong.append(f"num_nextn_predict_layers is {settings.model.num_nextn_predict_layers}: it has none")
    if "moe_config" in settings.present and settings.moe_config.expert_num > 1:
        wrong.append("moe_config describes experts: those of transformers are described by their configuration")
    if wrong:
        raise ConfigError(
            f"the model is that of {directory} (pretrained_model_dir), and the file asks for another:"
            f" {'; '.join(wrong)}. Take these keys out, or pretrained_model_dir"
        )


def keys_without_effect(settings: Settings) -> list[str]:
    """What the file says about kernels, where the model is one of transformers, in words."""
    directory = settings.top_level.pretrained_model_dir
    if not directory:
        return []
    asked = _written(settings, _KERNELS)
    if "moe_config" in settings.present and settings.moe_config.use_gmm:
        asked.setdefault("use_gmm", True)
    reason = f"the model of {directory} has kernels of its own, which transformers chooses"
    found = [f"{key}: {value} has no effect: {reason}" for key, value in asked.items()]
    if settings.model.head_loss == "chunked":
        found.append(f"head_loss: chunked has no effect: the model of {directory} has a head of its own")
    return found


def _written(settings: Settings, keys: tuple[str, ...]) -> dict[str, Any]:
    model = settings.model
    fields = type(model).model_fields
    return {key: value for key in keys if (value := getattr(model, key)) != fields[key].default}


def _config(directory: str) -> dict[str, Any]:
    """The model's configuration; nothing where it cannot be read, which is an error when the model is built."""
    try:
        value = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return _flat(value) if isinstance(value, dict) else {}


def _flat(value: dict[str, Any]) -> dict[str, Any]:
    """The configuration with what its sections have, such as ``rope_parameters``."""
    inner = [_flat(one) for one in value.values() if isinstance(one, dict)]
    return {key: one for part in (*inner, value) for key, one in part.items()}

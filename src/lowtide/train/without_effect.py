"""Settings that a file may have and that the runner does not carry out: each is said, never passed over."""

from __future__ import annotations

from typing import Any

from lowtide.config.schema import Settings
from lowtide.config.schema.callbacks import CheckpointMonitor, EvalCallBack, MaxLogitsMonitor, TopkBiasBalanceCallback
from lowtide.errors import ConfigError
from lowtide.models.experts_shape import experts_of
from lowtide.train.transformers_model import keys_without_effect

__all__ = ["refuse_ignored", "settings_without_effect"]

_KERNELS = "each kernel computes in the type it is made for"
_FUSED = "there is no such kernel here; it runs in parts"
_FLOAT32 = ("float32", "fp32")
_SETTINGS: dict[str, dict[str, tuple[str, tuple[Any, ...]]]] = {
    "top_level": {
        "resume_training": ("a run in its directory is continued by itself; --resume CHECKPOINT takes another", ()),
    },
    "model": {
        "layernorm_compute_dtype": (_KERNELS, ()),
        "softmax_compute_dtype": (_KERNELS, ()),
        "rotary_dtype": ("rotary tables are float32", _FLOAT32),
        "router_dense_type": ("routers compute in float32", _FLOAT32),
        "use_fused_ops_permute": (_FUSED, (False,)),
        "use_fused_ops_topkrouter": (_FUSED, (False,)),
    },
    "moe_config": {
        "routing_policy": ("there is one router; its other keys say what it does", ()),
        "topk_method": ("n_group and topk_group say how experts are chosen", ()),
        "router_dense_type": ("routers compute in float32", _FLOAT32),
        "enable_sdrop": ("slots beyond an expert's capacity are dropped by position anyway", ()),
        "enable_gmm_safe_tokens": ("the grouped product takes experts without tokens", ()),
        "use_fused_ops_permute": (_FUSED, ()),
        "use_fused_ops_topkrouter": (_FUSED, ()),
    },
    "train_dataset": {"input_columns": ("samples have tokens and labels", ())},
    "parallelism": {"data_parallel_shard_strategy": ("parameters, gradients and optimizer states are shared", ())},
    "checkpoint": {"no_load_optim": ("load_path loads weights only", ())},
}
"""By section and key: why it has no effect, and the values that ask for what happens anyway."""


def refuse_ignored(settings: Settings) -> None:
    """ConfigError for a setting that would change the training and that nothing here carries out."""
    balancing = [one for one in settings.callbacks if isinstance(one, TopkBiasBalanceCallback)]
    if not balancing or settings.top_level.pretrained_model_dir:
        return
    experts = experts_of(settings)
    moves = experts is not None and experts.bias
    rate = experts.bias_rate if experts is not None and moves else None
    for callback in balancing:
        for key, asked, found in (
            ("balance_via_topk_bias", callback.balance_via_topk_bias, moves),
            ("topk_bias_update_rate", callback.topk_bias_update_rate, rate),
        ):
            if asked is not None and asked != found:
                raise ConfigError(
                    f"the callback {callback.type} has {key}: {asked}, and the model's settings give {found}; the bias"
                    " moves as the model says: write it there (moe_config.balance_via_topk_bias and"
                    " topk_bias_update_rate, or moe_router_enable_expert_bias and moe_router_bias_update_rate)"
                )


def settings_without_effect(settings: Settings) -> list[str]:
    """What the file sets and the runner does not carry out, in words."""
    found = keys_without_effect(settings)
    for name, keys in _SETTINGS.items():
        section = getattr(settings, name)
        for key, (reason, harmless) in keys.items():
            value = getattr(section, key)
            if value != type(section).model_fields[key].default and value not in harmless:
                found.append(f"{key}: {value} has no effect: {reason}")
    top = settings.top_level
    asked = [name for name in ("eval_dataset", "eval_dataset_task") if getattr(top, name) is not None]
    asked += [f"the callback {one.type}" for one in settings.callbacks if isinstance(one, EvalCallBack)]
    if asked and not top.do_eval:
        found.append(f"{asked[0]} has no effect: do_eval is false")
    for callback in settings.callbacks:
        if isinstance(callback, MaxLogitsMonitor):
            found.append(f"the callback {callback.type} has no effect: the runner trains only")
        elif isinstance(callback, TopkBiasBalanceCallback):
            found.append(f"the callback {callback.type} has no effect: the bias moves as the model's settings say")
        elif isinstance(callback, CheckpointMonitor) and callback.prefix != "CKP":
            found.append(f"prefix: {callback.prefix} has no effect: checkpoints are named by their step")
    return found

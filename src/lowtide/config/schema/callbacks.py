"""What happens around a step: the list ``callbacks`` (or ``callback``)."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from lowtide.config.schema.field import Count, Free, Index, NoEffect, Positive, Section

__all__ = [
    "CALLBACKS",
    "IGNORED",
    "Callback",
    "CheckpointMonitor",
    "EvalCallBack",
    "MFLossMonitor",
    "MaxLogitsMonitor",
    "MoEDropRateCallback",
    "OtherCallback",
    "TopkBiasBalanceCallback",
    "TrainCallBack",
]

FORMAT = "checkpoints are written by torch's distributed checkpoint, each part once"


class MFLossMonitor(Section):
    """Logs the loss."""

    type: Literal["MFLossMonitor"] = "MFLossMonitor"
    """MFLossMonitor."""
    per_print_times: Count = 1
    """Steps between two lines; default 1."""


class CheckpointMonitor(Section):
    """Saves the model and the optimizer."""

    type: Literal["CheckpointMonitor"] = "CheckpointMonitor"
    """CheckpointMonitor."""
    prefix: str = "CKP"
    """The first part of the files' names; default CKP."""
    directory: str | None = None
    """Where files are written; default: `output_dir`."""
    save_checkpoint_steps: Count = 1
    """Steps between two checkpoints; default 1."""
    keep_checkpoint_max: Index = 5
    """Checkpoints that are kept; 0 keeps all; default 5."""
    integrated_save: Annotated[bool, NoEffect(FORMAT)] | None = None
    """Whether the reference joins the parts of a weight; default: unset."""
    async_save: bool = False
    """Whether training goes on while files are written; default false."""
    checkpoint_format: Annotated[Literal["safetensors", "ckpt"], NoEffect(FORMAT, harmless=("safetensors",))] = (
        "safetensors"
    )
    """The format of the reference's files; default safetensors."""
    remove_redundancy: Annotated[bool, NoEffect(FORMAT)] | None = None
    """Whether each part is written by one rank only; always so here; default: unset."""


class MoEDropRateCallback(Section):
    """Logs the share of tokens that experts drop; needs `moe_config.callback_moe_droprate`."""

    type: Literal["MoEDropRateCallback"] = "MoEDropRateCallback"
    """MoEDropRateCallback."""
    expert_num: Count | None = None
    """Experts of a layer; required."""
    capacity_factor: Positive | None = None
    """Tokens an expert takes, as a multiple of the even share; required."""
    num_layers: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Layers of the model; required."""
    mtp_depth: Index | None = None
    """Multi-token-prediction layers; required."""


class TopkBiasBalanceCallback(Section):
    """Moves the bias that balances the experts' load."""

    type: Literal["TopkBiasBalanceCallback"] = "TopkBiasBalanceCallback"
    """TopkBiasBalanceCallback."""
    balance_via_topk_bias: bool | None = None
    """Whether the bias is moved; default: the model's."""
    topk_bias_update_rate: float | None = None
    """How fast the bias moves; default: the model's."""
    expert_num: Count | None = None
    """Experts of a layer; default: the model's."""
    num_layers: Count | None = None
    """Layers of the model; default: the model's."""
    micro_batch_num: Count | None = None
    """Micro-batches of a step; default: the run's."""
    gradient_accumulation_steps: Count | None = None
    """Accumulated micro-steps; default: the run's."""


class EvalCallBack(Section):
    """When to evaluate, over `eval_step_interval` and `eval_epoch_interval`; needs `do_eval: true`."""

    type: Literal["EvalCallBack"] = "EvalCallBack"
    """EvalCallBack."""
    step_interval: int = 100
    """Steps between two evaluations; default 100."""
    epoch_interval: int = -1
    """Epochs between two evaluations; -1 for none; default -1."""


class TrainCallBack(Section):
    """Ends training early."""

    type: Literal["TrainCallBack"] = "TrainCallBack"
    """TrainCallBack."""
    stop_step: Index | None = None
    """The step after which training ends; default: none."""


class MaxLogitsMonitor(Section):
    """Logs the largest attention score of each layer."""

    type: Literal["MaxLogitsMonitor"] = "MaxLogitsMonitor"
    """MaxLogitsMonitor."""
    step_interval: Count = 1
    """Steps between two lines; default 1."""


class OtherCallback(Section):
    """A callback of the reference that has no effect here."""

    type: str = ""
    """The callback's name."""
    settings: Free | None = None
    """Its settings, as written."""


Callback: TypeAlias = (
    MFLossMonitor
    | CheckpointMonitor
    | MoEDropRateCallback
    | TopkBiasBalanceCallback
    | EvalCallBack
    | TrainCallBack
    | MaxLogitsMonitor
    | OtherCallback
)

CALLBACKS: dict[str, type[Section]] = {
    "MFLossMonitor": MFLossMonitor,
    "CheckpointMonitor": CheckpointMonitor,
    "MoEDropRateCallback": MoEDropRateCallback,
    "TopkBiasBalanceCallback": TopkBiasBalanceCallback,
    "EvalCallBack": EvalCallBack,
    "TrainCallBack": TrainCallBack,
    "MaxLogitsMonitor": MaxLogitsMonitor,
}
"""The callbacks that are honoured."""

IGNORED = {
    "ProfileMonitor": "use the `profile` keys",
    "SummaryMonitor": "losses are logged by MFLossMonitor",
    "TrainingStateMonitor": "norms are logged with the loss",
    "ColdHotExpertMonitor": "it belongs to Ascend",
    "StressDetectCallBack": "it belongs to Ascend",
    "StressTestModelMonitor": "it belongs to Ascend",
    "SDCMonitor": "it belongs to Ascend",
    "ExpertMigrateCallback": "it belongs to Ascend",
}
"""The callbacks that are accepted without effect, each with its reason."""

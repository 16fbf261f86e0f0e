"""The sections that only the 2026 layout has: the run, and what becomes of activations.

Of ``recompute``, ``recompute_comm`` and ``swap`` only the names are checked here, as in the graph layout.
"""

from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field, SkipValidation

from lowtide.config.schema.field import Count, Degree, Index, ListOf, Positive, Section, Seed
from lowtide.config.schema.memory import SwapLimits

__all__ = ["Checkpoint", "Parallelism", "Recompute", "RecomputeComm", "Swap", "SwapSpec", "Training"]

LayerSpecs: TypeAlias = list[Index | str]
"""Layers such as 5, "5" or "0-19"."""


class Training(Section):
    """The length of a run and the size of its steps."""

    steps: Count | None = None
    """Optimizer steps of the run; default: one pass over the data."""
    local_batch_size: Count = 1
    """Samples of one data-parallel rank in one micro-step; default 1."""
    global_batch_size: Count | None = None
    """Samples of one optimizer step over all ranks; default: one micro-step of each rank."""
    max_norm: Positive = 1.0
    """The largest norm of all gradients together; default 1.0."""
    seed: Seed = 0
    """The seed of weights and dropout; default 0."""
    deterministic: bool = False
    """Whether only deterministic kernels are used; default false."""


class Parallelism(Section):
    """The degrees of parallelism; their product is the number of devices."""

    data_parallel_shard: Degree | None = None
    """Ranks that share parameters and optimizer states; default: all that the other degrees leave."""
    data_parallel_replicate: Degree = 1
    """Copies of those groups of ranks; default 1."""
    data_parallel_shard_strategy: str | None = None
    """What is shared among them, such as the optimizer's states only; default: everything."""
    tensor_parallel: Degree = 1
    """Devices that share each layer's weights; default 1."""
    context_parallel: Degree = 1
    """Devices that share each sequence; default 1."""
    context_parallel_method: str | None = None
    """How sequences are shared; the runner exchanges heads for tokens, whatever is written; default: unset."""
    pipeline_parallel: Annotated[int, Field(ge=1, le=65_536)] = 1
    """Pipeline stages; default 1."""
    pipeline_parallel_interleave_num: Annotated[int, Field(ge=1, le=1024)] = 1
    """Chunks of layers on each stage; default 1."""
    pipeline_parallel_layers_per_stage: Literal["auto"] | ListOf[str] = "auto"
    """Text "auto" for even shares, or for each stage its layers, chunk by chunk, such as "0-3,8-11"; default "auto"."""
    expert_parallel: Degree = 1
    """Devices that share the experts of each layer; default 1."""
    cpu_offload: bool = False
    """Whether parameters and optimizer states live on the host; default false."""
    reshard_after_forward_policy: bool | Literal["default", "always", "never"] = "default"
    """Whether gathered parameters are freed after forward; default "default"."""


class Checkpoint(Section):
    """Saving and loading."""

    enable_save: bool = False
    """Whether checkpoints are saved; default false."""
    save_path: str | None = None
    """Where they are saved; default: `output_dir`."""
    save_max: Index = 5
    """Checkpoints that are kept; 0 keeps all; default 5."""
    save_interleaved_steps: Count = 1
    """Steps between two checkpoints; default 1."""
    load_path: str | None = None
    """The checkpoint to start from; default: none."""
    no_load_optim: bool = False
    """Whether the optimizer's states are left out when loading; default false."""


class Recompute(Section):
    """What is computed again in backward (2026 layout)."""

    unknown: ClassVar[Literal["error", "warn"]] = "error"

    mode: SkipValidation[Literal["None", "full", "select"] | None] = None
    """Mode "full" for whole layers, "select" for operators, "None" for nothing; default nothing."""
    full_recompute_layer: SkipValidation[LayerSpecs | None] = None
    """The layers of mode full, such as ["0-19", "25"]; default: none."""
    select_module: SkipValidation[dict[str, LayerSpecs] | None] = None
    """The operators of mode select: a regular expression of the whole path, and its layers; default: none."""
    exclude_op: SkipValidation[dict[str, LayerSpecs] | None] = None
    """Operators that are never recomputed, written as `select_module`; default: none."""


class RecomputeComm(Section):
    """Collectives that are re-issued in backward (2026 layout)."""

    unknown: ClassVar[Literal["error", "warn"]] = "error"

    enable: SkipValidation[bool] = False
    """Whether collectives are re-issued; default false."""
    select_module: SkipValidation[dict[str, LayerSpecs] | None] = None
    """The modules: a regular expression of the whole path, and its layers; default: none."""


class SwapSpec(Section):
    """Layers, or operators of layers, that are swapped (2026 layout)."""

    unknown: ClassVar[Literal["error", "warn"]] = "error"

    op_name: str | list[str] | None = None
    """The operator: a regular expression of the whole path; only in `op_swap`."""
    backward_prefetch: Count = 1
    """How many layers before its use a tensor's way back begins; default 1."""
    layers: bool | LayerSpecs = True
    """The layers, such as [0, 3] or ["0-19"]; true for all."""
    tier: Literal["host", "disk"] = "host"
    """Where tensors wait; an addition of lowtide; default host."""


class Swap(Section):
    """What waits on the host between forward and backward (2026 layout)."""

    unknown: ClassVar[Literal["error", "warn"]] = "error"

    enable: SkipValidation[bool] = False
    """Whether activations are swapped; default false."""
    default_prefetch: SkipValidation[Count] = 1
    """How many layers before its use a tensor's way back begins; below the number of layers; default 1."""
    layer_swap: SkipValidation[list[SwapSpec] | SwapSpec | None] = None
    """Layers that are swapped; default: none."""
    op_swap: SkipValidation[list[SwapSpec] | SwapSpec | None] = None
    """Operators that are swapped; default: none."""
    limits: SkipValidation[SwapLimits | None] = None
    """What swapping may take; default: half of the host's memory, 2GiB in flight, 1TiB of disk."""

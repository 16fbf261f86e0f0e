"""The sections that only the 2026 layout has: ``training``, ``parallelism``, ``checkpoint``."""

from __future__ import annotations

from typing import Annotated, Literal

from lowtide.config.schema.field import Count, Degree, Index, Positive, Range, Section, Seed

__all__ = ["Checkpoint", "Parallelism", "Training"]


class Training(Section):
    """The length of a run and the size of its steps."""

    steps: Count | None = None
    """Optimizer steps of the run; default: one pass over the data."""
    local_batch_size: Count = 1
    """Samples of one data-parallel rank in one micro step; default 1."""
    global_batch_size: Count | None = None
    """Samples of one optimizer step over all ranks; default: one micro step of each rank."""
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
    """How sequences are shared; default: torch's."""
    pipeline_parallel: Annotated[int, Range(1, 65_536)] = 1
    """Pipeline stages; default 1."""
    pipeline_parallel_interleave_num: Annotated[int, Range(1, 1024)] = 1
    """Chunks of layers on each stage; default 1."""
    pipeline_parallel_layers_per_stage: Literal["auto"] | list[str] = "auto"
    """Text "auto" for even shares, or for each stage its layers, chunk by chunk, such as "0-3,8-11"; default "auto"."""
    expert_parallel: Degree = 1
    """Devices that share the experts of each layer; default 1."""
    cpu_offload: bool = False
    """Whether parameters and optimizer states live on the host; default false."""
    reshard_after_forward_policy: bool | Literal["default", "always", "never"] = "default"
    """Whether gathered parameters are let go after forward; default "default"."""


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

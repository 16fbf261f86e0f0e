"""What becomes of activations in the graph layout: ``recompute_config`` and ``swap_config``.

Only names are checked here. Values need the model's layers and stages; they are handed on as written.
"""

from typing import ClassVar, Literal, TypeAlias

from pydantic import SkipValidation

from lowtide.config.schema.field import Bytes, Count, Index, Section

__all__ = ["LayerSwap", "OperatorSwap", "RecomputeConfig", "SwapConfig", "SwapLimits"]

LayerCounts: TypeAlias = bool | list[Index | bool] | list[list[Index | bool] | bool]
"""All layers, counts per stage, or counts per mini-stage (one list per interleave)."""
Patterns: TypeAlias = LayerCounts | list[str] | dict[str, LayerCounts]
"""Counts for the usual operators, patterns for all layers, or counts for each pattern."""


class RecomputeConfig(Section):
    """What is computed again in backward instead of held (graph layout)."""

    unknown: ClassVar[Literal["error", "warn"]] = "error"

    recompute: SkipValidation[LayerCounts] = False
    """Whole layers: true for all, or how many of each stage or mini-stage (with swap: layer numbers); default false."""
    select_recompute: SkipValidation[Patterns] = False
    """Single operators: the usual ones as in `recompute`, or patterns, or layers for each pattern; default false."""
    select_comm_recompute: SkipValidation[Patterns] = False
    """Collectives re-issued in backward, written as `select_recompute`; usually norms; default false."""
    select_recompute_exclude: SkipValidation[Patterns] = False
    """Operators that are never recomputed, written as `select_recompute`; wins over all else; default false."""
    select_comm_recompute_exclude: SkipValidation[Patterns] = False
    """Collectives that are never re-issued, written as `select_recompute`; default false."""
    parallel_optimizer_comm_recompute: SkipValidation[bool] = False
    """Whether sharded parameters are gathered again in backward instead of held; default false."""
    mp_comm_recompute: SkipValidation[bool] = True
    """Whether recomputed layers re-issue their tensor-parallel collectives instead of holding their results; default
    true."""
    recompute_slice_activation: SkipValidation[bool] = False
    """Whether each tensor-parallel rank holds only its slice of a recomputed layer's input; default false."""


class LayerSwap(Section):
    """Layers whose activations are swapped."""

    unknown: ClassVar[Literal["error", "warn"]] = "error"

    backward_prefetch: Count = 1
    """How many operators before its use a tensor's way back begins; default 1."""
    layers: bool | list[Index] = True
    """The layers, by number from 0; true for all."""
    tier: Literal["host", "disk"] = "host"
    """Where tensors wait; an addition of lowtide; default host."""


class OperatorSwap(Section):
    """Operators whose activations are swapped."""

    unknown: ClassVar[Literal["error", "warn"]] = "error"

    op_name: str | list[str] = ""
    """The operator or module inside a layer, such as attention, or several."""
    backward_prefetch: Count = 1
    """How many operators before its use a tensor's way back begins; default 1."""
    layers: bool | list[Index] = True
    """The layers, by number from 0; true for all."""
    tier: Literal["host", "disk"] = "host"
    """Where tensors wait; an addition of lowtide; default host."""


class SwapLimits(Section):
    """What swapping may take on each rank; where a limit is reached a tensor stays on the device, and the receipt says
    so. An addition of lowtide."""

    unknown: ClassVar[Literal["error", "warn"]] = "error"

    host_bytes: Bytes | None = None
    """Host memory, such as 64GiB; default: half of the machine's, shared by its ranks."""
    disk_bytes: Bytes | None = None
    """Space on disk, for entries with `tier: disk`; default 1TiB."""
    in_flight_bytes: Bytes | None = None
    """Device memory of tensors on their way out or back; default 2GiB."""
    minimum_bytes: Bytes | None = None
    """Smaller tensors stay on the device; default 4KiB."""
    disk_directory: str | None = None
    """Where the disk tier has its file, on every node; default: the system's directory for temporary files."""


class SwapConfig(Section):
    """What waits on the host between forward and backward (graph layout)."""

    unknown: ClassVar[Literal["error", "warn"]] = "error"

    swap: SkipValidation[bool] = False
    """Whether activations are swapped; default false."""
    default_prefetch: SkipValidation[Count] = 1
    """The prefetch of the usual choice, attention of all layers, where neither list is given; default 1."""
    layer_swap: SkipValidation[list[LayerSwap] | LayerSwap | None] = None
    """Layers that are swapped; default: none."""
    op_swap: SkipValidation[list[OperatorSwap] | OperatorSwap | None] = None
    """Operators that are swapped; default: none."""
    limits: SkipValidation[SwapLimits | None] = None
    """What swapping may take; default: half of the host's memory, 2GiB in flight, 1TiB of disk."""

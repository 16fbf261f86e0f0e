"""What becomes of activations: ``recompute_config``, ``swap_config``, and the 2026 layout's forms of them.

Only names are checked here. Values need the model's layers and stages; they are handed on as written.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

from lowtide.config.schema.field import Count, Elsewhere, Index, Section

__all__ = [
    "LayerSwap",
    "OperatorSwap",
    "Recompute",
    "RecomputeComm",
    "RecomputeConfig",
    "Swap",
    "SwapConfig",
    "SwapSpec",
]

LayerCounts: TypeAlias = bool | list[Index | bool] | list[list[Index | bool] | bool]
"""All layers, counts per stage, or counts per mini-stage (one list per interleave)."""
Patterns: TypeAlias = LayerCounts | list[str] | dict[str, LayerCounts]
"""Counts for the usual operators, patterns for all layers, or counts for each pattern."""
LayerSpecs: TypeAlias = list[Index | str]
"""Layers such as 5, "5" or "0-19"."""


class RecomputeConfig(Section):
    """What is computed again in backward instead of held (graph layout)."""

    unknown: ClassVar[Literal["error", "warn"]] = "error"

    recompute: Annotated[LayerCounts, Elsewhere()] = False
    """Whole layers: true for all, or how many of each stage or mini-stage (with swap: layer numbers); default false."""
    select_recompute: Annotated[Patterns, Elsewhere()] = False
    """Single operators: the usual ones as in `recompute`, or patterns, or layers for each pattern; default false."""
    select_comm_recompute: Annotated[Patterns, Elsewhere()] = False
    """Collectives issued again in backward, written as `select_recompute`; usually norms; default false."""
    select_recompute_exclude: Annotated[Patterns, Elsewhere()] = False
    """Operators that are never recomputed, written as `select_recompute`; wins over all else; default false."""
    select_comm_recompute_exclude: Annotated[Patterns, Elsewhere()] = False
    """Collectives that are never repeated, written as `select_recompute`; default false."""
    parallel_optimizer_comm_recompute: Annotated[bool, Elsewhere()] = False
    """Whether divided parameters are gathered again in backward instead of held; default false."""
    mp_comm_recompute: Annotated[bool, Elsewhere()] = True
    """Whether tensor-parallel collectives are repeated in recomputed parts instead of held; default true."""
    recompute_slice_activation: Annotated[bool, Elsewhere()] = False
    """Whether the held inputs of recomputed layers are divided over tensor parallel; default false."""


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


class SwapConfig(Section):
    """What waits on the host between forward and backward (graph layout)."""

    unknown: ClassVar[Literal["error", "warn"]] = "error"

    swap: Annotated[bool, Elsewhere()] = False
    """Whether activations are swapped; default false."""
    default_prefetch: Annotated[Count, Elsewhere()] = 1
    """The prefetch of the usual choice, attention of all layers, where neither list is given; default 1."""
    layer_swap: Annotated[list[LayerSwap] | LayerSwap | None, Elsewhere()] = None
    """Layers that are swapped; default: none."""
    op_swap: Annotated[list[OperatorSwap] | OperatorSwap | None, Elsewhere()] = None
    """Operators that are swapped; default: none."""


class Recompute(Section):
    """What is computed again in backward (2026 layout)."""

    unknown: ClassVar[Literal["error", "warn"]] = "error"

    mode: Annotated[Literal["None", "full", "select"] | None, Elsewhere()] = None
    """Mode "full" for whole layers, "select" for operators, "None" for nothing; default nothing."""
    full_recompute_layer: Annotated[LayerSpecs, Elsewhere()] | None = None
    """The layers of mode full, such as ["0-19", "25"]; default: none."""
    select_module: Annotated[dict[str, LayerSpecs], Elsewhere()] | None = None
    """The operators of mode select: a regular expression of the whole path, and its layers; default: none."""
    exclude_op: Annotated[dict[str, LayerSpecs], Elsewhere()] | None = None
    """Operators that are never recomputed, written as `select_module`; default: none."""


class RecomputeComm(Section):
    """Collectives that are issued again in backward (2026 layout)."""

    unknown: ClassVar[Literal["error", "warn"]] = "error"

    enable: Annotated[bool, Elsewhere()] = False
    """Whether collectives are repeated; default false."""
    select_module: Annotated[dict[str, LayerSpecs], Elsewhere()] | None = None
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

    enable: Annotated[bool, Elsewhere()] = False
    """Whether activations are swapped; default false."""
    default_prefetch: Annotated[Count, Elsewhere()] = 1
    """How many layers before its use a tensor's way back begins; below the number of layers; default 1."""
    layer_swap: Annotated[list[SwapSpec] | SwapSpec | None, Elsewhere()] = None
    """Layers that are swapped; default: none."""
    op_swap: Annotated[list[SwapSpec] | SwapSpec | None, Elsewhere()] = None
    """Operators that are swapped; default: none."""

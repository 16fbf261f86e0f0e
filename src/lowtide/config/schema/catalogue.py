"""Which sections there are, which class reads each, and which layout it belongs to."""

from __future__ import annotations

from importlib import import_module
from typing import Literal, cast

from lowtide.config.schema.field import Section

__all__ = ["AS_WRITTEN", "ONLY_2026", "ONLY_GRAPH", "SECTIONS", "TELLS_2026", "TELLS_GRAPH", "Layout", "section_class"]

Layout = Literal["graph", "2026"]

SECTIONS: dict[str, tuple[str, str]] = {
    "runner_config": ("runner", "RunnerConfig"),
    "runner_wrapper": ("runner", "RunnerWrapper"),
    "parallel": ("parallel", "Parallel"),
    "parallel_config": ("parallel", "ParallelConfig"),
    "context": ("context", "Context"),
    "model": ("model", "ModelSection"),
    "model_config": ("model", "ModelConfig"),
    "moe_config": ("moe", "MoEConfig"),
    "recompute_config": ("memory", "RecomputeConfig"),
    "swap_config": ("memory", "SwapConfig"),
    "recompute": ("pynative", "Recompute"),
    "recompute_comm": ("pynative", "RecomputeComm"),
    "swap": ("pynative", "Swap"),
    "adapt": ("adapt", "Adapt"),
    "optimizer": ("optimizer", "Optimizer"),
    "lr_schedule": ("optimizer", "LrSchedule"),
    "lr_scheduler": ("optimizer", "LrSchedule"),
    "grouped_lr_schedule": ("optimizer", "GroupedLrSchedule"),
    "train_dataset": ("dataset", "TrainDataset"),
    "train_dataset_task": ("dataset", "TrainDatasetTask"),
    "processor": ("dataset", "Processor"),
    "trainer": ("top_level", "Trainer"),
    "training": ("pynative", "Training"),
    "parallelism": ("pynative", "Parallelism"),
    "checkpoint": ("pynative", "Checkpoint"),
}
"""Each section's module and class; a module is imported when a file has the section."""

AS_WRITTEN: dict[str, tuple[str, ...]] = {
    "recompute_config": (
        "recompute",
        "select_recompute",
        "select_comm_recompute",
        "select_recompute_exclude",
        "select_comm_recompute_exclude",
        "mp_comm_recompute",
        "parallel_optimizer_comm_recompute",
        "recompute_slice_activation",
    ),
    "swap_config": ("swap", "default_prefetch", "layer_swap", "op_swap", "limits"),
    "recompute": ("mode", "full_recompute_layer", "select_module", "exclude_op"),
    "recompute_comm": ("enable", "select_module"),
    "swap": ("enable", "default_prefetch", "layer_swap", "op_swap", "limits"),
}
"""The sections whose values are read with the layers at hand, not here, with their keys. Their classes describe them in
the JSON Schema; a check of a file need not import those."""

TELLS_GRAPH = ("runner_config", "parallel_config", "recompute_config", "swap_config")
TELLS_2026 = ("training", "parallelism", "recompute", "recompute_comm", "swap")
ONLY_GRAPH = {
    **dict.fromkeys(TELLS_GRAPH, ""),
    "runner_wrapper": "`training`",
    "parallel": "`parallelism`",
    "moe_config": "`model`",
    "model_config": "`model`",
    "lr_schedule": "`lr_scheduler`",
    "train_dataset_task": "`train_dataset`",
}
"""Sections of the graph layout alone, each with the 2026 section that has its keys."""
ONLY_2026 = {
    **dict.fromkeys(TELLS_2026, ""),
    "checkpoint": "the callback CheckpointMonitor and `load_checkpoint`",
    "lr_scheduler": "`lr_schedule`",
}
"""Sections of the 2026 layout alone, each with what has its keys in the graph layout."""


def section_class(name: str) -> type[Section]:
    """The class of a section, imported now if it was not."""
    module, attribute = SECTIONS[name]
    return cast(type[Section], getattr(import_module(f"lowtide.config.schema.{module}"), attribute))

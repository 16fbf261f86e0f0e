"""The plan of a run, without running it: every part of the model is built on meta, which takes no memory."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import torch

from lowtide.config.check import Check
from lowtide.models.build import build_model
from lowtide.models.shape import shape_of
from lowtide.policy import LayerPolicy, Recompute, Swap, format_layers
from lowtide.train.data.packing import packing_of
from lowtide.train.job import refuse_context, refuse_predictions, refuse_tied
from lowtide.train.pipeline import Stage, stages_of
from lowtide.train.run import Run
from lowtide.units import format_bytes

__all__ = ["dry_run", "plan_of"]


def dry_run(run: Run, check: Check, *, as_json: bool) -> int:
    """Print the plan; the exit code."""
    plan = plan_of(run, check)
    if as_json:
        print(json.dumps(plan))
    else:
        _show(plan)
    return 0


def plan_of(run: Run, check: Check) -> dict[str, Any]:
    """What each pipeline stage would have, and what a step would be."""
    settings = check.settings
    assert settings is not None
    packing_of(settings, run)
    degrees = run.degrees
    plan: dict[str, Any] = {
        "processes": degrees.world,
        "degrees": {
            "replicate": degrees.replicate,
            "shard": degrees.shard,
            "tensor": degrees.tensor,
            "context": degrees.context,
            "sequence_parallel": degrees.sequence_parallel,
            "pipeline": degrees.pipeline,
            "expert": degrees.expert,
        },
        "schedule": run.schedule if degrees.pipeline > 1 else None,
        "samples_per_step": run.samples_per_step,
        "tokens_per_step": run.samples_per_step * run.sequence,
        "micro_steps": run.micro_steps,
        "batch_size": run.batch_size,
        "parameters": run.precision.parameters,
        "compute": run.precision.compute,
        "decisions": str(check.policy) if check.policy is not None else None,
        "stages": [],
        "notes": list(run.notes),
    }
    if run.adapt is not None:
        filled = "the device's memory" if run.adapt.budget is None else format_bytes(run.adapt.budget)
        plan["notes"].append(
            f"the run adapts itself: {run.adapt.profiling_steps} steps are measured, then the fastest way within"
            f" {filled} is taken; the decisions here are fixed"
        )
    if settings.top_level.pretrained_model_dir:
        plan["notes"].append(f"the model is {settings.top_level.pretrained_model_dir}, built when the run starts")
        return plan
    shape = shape_of(settings)
    refuse_predictions(shape, run)
    refuse_context(shape, run)
    refuse_tied(shape, run)
    for rank in range(degrees.pipeline):
        for stage in stages_of(run.placement, rank):
            with torch.device("meta"):
                model = build_model(shape, layers=stage.layers, first=stage.first, last=stage.last)
            numbers = sum(parameter.numel() for parameter in model.parameters())
            held = numbers // (degrees.tensor * degrees.sharded)
            plan["stages"].append(
                {
                    "rank": rank,
                    "stage": stage.number,
                    "layers": list(stage.layers),
                    "parameters": numbers,
                    # parameters, gradients and AdamW's two states, each in the parameters' type
                    "bytes_a_rank": 4 * held * getattr(torch, run.precision.parameters).itemsize,
                    "decisions": _decisions(stage, check),
                }
            )
    return plan


def _decisions(stage: Stage, check: Check) -> str:
    """How many layers are decided how; ``lowtide check`` says it layer by layer."""
    if check.policy is None:
        return ""
    counts = Counter(_word(check.policy.layers[layer]) for layer in stage.layers)
    return ", ".join(f"{count} {word}" for word, count in counts.items())


def _word(layer: LayerPolicy) -> str:
    if isinstance(layer.default, Recompute):
        return "recomputed"
    if isinstance(layer.default, Swap):
        return "swapped"
    return "by operator" if layer.rules else "kept"


def _show(plan: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, emoji=False)
    degrees = ", ".join(f"{name} {value}" for name, value in plan["degrees"].items() if value not in (1, False))
    processes = "1 process" if plan["processes"] == 1 else f"{plan['processes']} processes"
    console.print(processes + (f": {degrees}" if degrees else ""))
    console.print(
        f"a step: {plan['samples_per_step']} samples, {plan['tokens_per_step']:,} tokens"
        f" ({plan['batch_size']} x {plan['micro_steps']} micro-steps); parameters {plan['parameters']}, matrix products"
        f" {plan['compute']}" + (f"; schedule {plan['schedule']}" if plan["schedule"] else "")
    )
    table = Table(box=None, pad_edge=False)
    for name in ("stage", "rank", "layers", "parameters", "weights, gradients, AdamW a rank", "activations"):
        table.add_column(name, justify="right" if name in ("stage", "rank", "parameters") else "left")
    for stage in plan["stages"]:
        table.add_row(
            str(stage["stage"]),
            str(stage["rank"]),
            format_layers(tuple(stage["layers"])) if stage["layers"] else "none",
            f"{stage['parameters']:,}",
            format_bytes(stage["bytes_a_rank"]),
            stage["decisions"],
        )
    console.print(table)
    for note in plan["notes"]:
        console.print(f"note: {note}")

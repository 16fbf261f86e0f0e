"""What ``lowtide plan`` and ``lowtide explain`` show on a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lowtide.planner.plan import Option, Plan
from lowtide.policy import format_layers
from lowtide.report.words import (
    fullest,
    headline,
    held_by_decision,
    layout,
    peak_sentence,
    policy_snippet,
    recommended,
    shares_by_kind,
    shares_by_operator,
    shown_options,
    speed,
)
from lowtide.units import format_bytes, format_seconds

__all__ = ["explanation_as_json", "print_explanation", "print_plan"]

_LARGEST = 6
"""Rows of the table of what the peak is made of."""


def print_plan(plan: Plan, console: Console) -> None:
    """Print whether it fits, and what the plan does in a step."""
    stages = plan.simulation.stages
    _print_headline(plan, console)
    _print_stages(plan, console)
    held = held_by_decision(plan)
    if any(held):
        parts = [f"{name} {format_bytes(size)}" for name, size in held._asdict().items() if size]
        console.print(f"of a micro-batch's activations: {', '.join(parts)}", soft_wrap=True)
    if any(stage.moved for stage in stages) and not any(stage.stall for stage in stages):
        console.print("no stalls: what is swapped is reloaded before it is needed", soft_wrap=True)
    if plan.feasible:
        console.print(
            f"no policy that fits can be more than {_gap(plan)} faster, as the simulator counts", soft_wrap=True
        )
    _print_notes(plan, console)


def print_explanation(plan: Plan, console: Console) -> None:
    """Print why: where the peak is and what it is made of, the options, and how to use the best of them."""
    _print_headline(plan, console)
    console.print()
    console.print(Text("the peak", style="bold"))
    console.print(f"  {peak_sentence(plan)}", soft_wrap=True)
    _print_shares(plan, console)
    if plan.options:
        console.print()
        console.print(Text("options" if plan.feasible else "options that were tried", style="bold"))
        console.print(_options(plan))
    console.print()
    _print_advice(plan, console)
    _print_notes(plan, console)


def explanation_as_json(plan: Plan) -> dict[str, Any]:
    """The explanation as plain JSON values."""
    stage, best = fullest(plan), recommended(plan)
    return {
        "headline": headline(plan),
        "fits": plan.feasible,
        "model": plan.model,
        "device": plan.device,
        "pipeline": plan.pipeline.as_json(),
        "workload": plan.workload.as_json(),
        "tokens_per_second": plan.tokens_per_second,
        "mfu": plan.mfu,
        "budget": plan.budget,
        "least": plan.least,
        "reserved": plan.simulation.reserved,
        "seconds": plan.simulation.seconds,
        "bound": plan.bound,
        "gap": plan.gap,
        "peak": {
            "stage": stage.stage,
            "bytes": stage.peak,
            "at": stage.peak_at._asdict() if stage.peak_at is not None else None,
            "made_of": shares_by_kind(stage.shares),
            "largest": [
                {"what": what, "operator": operator, "layers": list(layers), "bytes": size}
                for what, operator, layers, size in shares_by_operator(stage.shares)
            ],
        },
        "options": [
            {
                "name": option.name,
                "reserved": option.simulation.reserved,
                "seconds": option.simulation.seconds,
                "fits": option.fits,
                "how": option.how,
                "recommended": option is best,
            }
            for option in plan.options
        ],
        "notes": list(plan.notes),
    }


def _print_headline(plan: Plan, console: Console) -> None:
    console.print(Text(headline(plan), style="bold green" if plan.feasible else "bold red"), soft_wrap=True)
    console.print(Text(layout(plan), style="dim"), soft_wrap=True)
    if fast := speed(plan):
        console.print(Text(fast, style="dim"), soft_wrap=True)


def _print_stages(plan: Plan, console: Console) -> None:
    """A line a stage; equal neighbours are one line."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    stages = plan.simulation.stages
    names = ("reserved", "static", "batches", "busy", "recompute", "stalls", "swapped", "host")
    if len(stages) > 1:
        table.add_column("stage")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    rows: list[tuple[list[int], tuple[str, ...]]] = []
    for stage in stages:
        row = (
            format_bytes(stage.reserved),
            format_bytes(stage.static),
            str(stage.in_flight),
            format_seconds(stage.busy),
            format_seconds(stage.recompute) if stage.recompute else "",
            format_seconds(stage.stall) if stage.stall else "",
            format_bytes(stage.moved) if stage.moved else "",
            format_bytes(stage.host_peak) if stage.host_peak else "",
        )
        if rows and rows[-1][1] == row:
            rows[-1][0].append(stage.stage)
        else:
            rows.append(([stage.stage], row))
    for which, cells in rows:
        table.add_row(*([format_layers(which)] if len(stages) > 1 else []), *cells)
    console.print(table)
    if len(stages) > 1:
        console.print(f"pipeline bubble {plan.simulation.bubble:.1%} of the step, on the busiest stage")


def _print_shares(plan: Plan, console: Console) -> None:
    stage = fullest(plan)
    if not stage.shares:
        return
    parts = [f"{name} {format_bytes(size)}" for name, size in shares_by_kind(stage.shares).items()]
    _print_wrapped(f"made of {', '.join(parts)}", "  ", console)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "bytes", "of the peak", "what", "layers"):
        table.add_column(name, justify="right" if name in ("bytes", "of the peak") else "left")
    rows = shares_by_operator(stage.shares)
    for what, operator, layers, size in rows[:_LARGEST]:
        name = f"{operator} ({what})" if operator else what
        where = f"{len(layers)}: {format_layers(layers)}" if layers else ""
        table.add_row("", format_bytes(size), f"{size / stage.peak:.0%}", name, where)
    rest = sum(row[3] for row in rows[_LARGEST:])
    if rest:
        table.add_row("", format_bytes(rest), f"{rest / stage.peak:.0%}", f"{len(rows) - _LARGEST} smaller", "")
    console.print(table)


def _options(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "reserved", "the budget", "step", "the plan", "option"):
        table.add_column(name, justify="left" if name in ("", "option") else "right", no_wrap=name != "option")
    best = recommended(plan)
    for option in shown_options(plan):
        table.add_row(*_option(option, plan, best), style="bold" if option is best else "")
    return table


def _option(option: Option, plan: Plan, best: Option | None) -> Iterator[str]:
    simulation = option.simulation
    spare = plan.budget - simulation.reserved
    yield "->" if option is best else ""
    yield format_bytes(simulation.reserved)
    against = f"{format_bytes(spare)} free" if spare >= 0 else f"{format_bytes(-spare)} over"
    yield against if plan.bounded else "none"
    yield format_seconds(simulation.seconds)
    yield f"{simulation.seconds / plan.simulation.seconds - 1:+.1%}" if plan.simulation.seconds else ""
    yield option.name


def _print_advice(plan: Plan, console: Console) -> None:
    """One option, and how to use it."""
    if not plan.feasible:
        least = plan.least or plan.simulation.reserved
        console.print(Text("what to do", style="bold"))
        _print_wrapped(
            f"give it {format_bytes(least)} a device, or hold less: a smaller --micro-batch-size or --seq, more tensor"
            " or pipeline ranks, or fewer micro-batches in flight",
            "  ",
            console,
        )
        return
    best = recommended(plan)
    name = best.name if best is not None else "the plan"
    console.print(Text.assemble(("recommended: ", "bold"), name), soft_wrap=True)
    if best is not None and best.how and best.policy.digest != plan.policy.digest:
        console.print("  write:")
        for line in best.how.splitlines():
            console.print(Text(f"    {line}"), soft_wrap=True)
        return
    console.print("  in Python (`lowtide plan … -o policy.json` writes the file):", soft_wrap=True)
    for line in policy_snippet().splitlines():
        console.print(Text(f"    {line}", style="cyan"), soft_wrap=True)
    if plan.yaml:
        console.print("  as MindSpore YAML (`lowtide plan … --yaml out.yaml` writes it):")
        for line in plan.yaml.rstrip().splitlines():
            console.print(Text(f"    {line}", style="cyan"), soft_wrap=True)


def _gap(plan: Plan) -> str:
    return f"{plan.gap:.2%}" if plan.gap is not None else "unknown"


def _print_notes(plan: Plan, console: Console) -> None:
    for note in plan.notes:
        _print_wrapped(f"note: {note}", "", console, style="dim")


def _print_wrapped(text: str, indent: str, console: Console, style: str = "") -> None:
    """Break a long sentence at blanks, lines after the first further in."""
    width = max(console.width, 40)
    for line in textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=f"{indent}  "):
        console.print(Text(line, style=style), soft_wrap=True)

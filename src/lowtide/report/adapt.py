"""The plan of an adaptive run as it is printed when the run switches to it, in the words of the MindSpeed guide."""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from lowtide.planner.plan import Option, Plan
from lowtide.planner.simple import FULL, NOTHING
from lowtide.planner.simulation import Simulation
from lowtide.policy import LayerPolicy, Recompute, Swap, format_layers
from lowtide.report.words import decision_kind, held_by_decision
from lowtide.units import format_bytes, format_seconds

__all__ = ["adaptive_text", "print_adaptive", "print_report", "say", "strategy"]

_RULE = "=" * 20
_MOST = 8
"""Lines of the strategy; further treatments of a layer are counted."""
_NAMED = 4
"""Operators that are named in a line; further ones are counted."""


def print_adaptive(plan: Plan, console: Console) -> None:
    """Print what the plan gains over keeping nothing and keeping everything, and what it does in each layer."""
    console.print(f"{_RULE} ADAPTIVE-RECOMPUTE Report {_RULE}", soft_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "memory", "time a step", "speed-up", ""):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    full = _named(plan, FULL)
    slowest = full.simulation.seconds if full is not None else None
    for title, found in (
        ("Without recompute:", _named(plan, NOTHING)),
        ("With what is fixed only:", _named(plan, "what is fixed")),
        ("With all recompute:", full),
    ):
        if found is not None:
            table.add_row(title, *_cells(found.simulation, slowest), "" if found.fits else "does not fit")
    if plan.feasible:
        table.add_row("With selective recompute:", *_cells(plan.simulation, slowest), "", style="bold")
    else:
        table.add_row("With selective recompute:", format_bytes(plan.least), "", "", "the least there is")
    console.print(table)
    budget = f"budget {format_bytes(plan.budget)}" if plan.bounded else "no budget"
    console.print(f"{budget}; predicted from what was measured", soft_wrap=True)
    console.print(">> final selective strategy <<", soft_wrap=True)
    for line in strategy(plan) if plan.feasible else ["  nothing fits: every layer is recomputed"]:
        console.print(line, soft_wrap=True)


class _Terminal(Console):
    """A console whose reader may go away: rich would redirect standard output and end the program."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def print_report(plan: Plan) -> None:
    """Print it for a person who runs a loop of his own: on standard error, which no program reads."""
    print_adaptive(plan, _terminal())


def say(text: str) -> None:
    """Print one line of what an adaptive run decides."""
    _terminal().print(f"lowtide: {text}", soft_wrap=True)


def _terminal() -> Console:
    # In a notebook too it is text: rich would make a block of HTML of each line.
    return _Terminal(stderr=True, highlight=False, markup=False, emoji=False, force_jupyter=False)


def adaptive_text(plan: Plan, width: int = 110) -> str:
    """What :func:`print_adaptive` prints, without colours, for a log."""
    text = io.StringIO()
    print_adaptive(plan, Console(file=text, width=width, highlight=False, markup=False, emoji=False))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def strategy(plan: Plan) -> Iterator[str]:
    """The Policy in short: a line for each treatment of a layer, and the bytes by decision."""
    treatments: dict[tuple[object, ...], list[int]] = {}
    texts: dict[tuple[object, ...], str] = {}
    for layer in range(len(plan.policy.layers)):
        key, text = _layer(plan, layer)
        treatments.setdefault(key, []).append(layer)
        texts[key] = text
    for key, layers in list(treatments.items())[:_MOST]:
        yield f"  {'layers' if len(layers) > 1 else 'layer'} {format_layers(tuple(layers))}: {texts[key]}"
    if len(treatments) > _MOST:
        count = sum(len(layers) for layers in list(treatments.values())[_MOST:])
        yield f"  {count} more layers in {len(treatments) - _MOST} other treatments: the saved Policy has them all"
    held = held_by_decision(plan)
    if any(held):
        parts = [f"{name} {format_bytes(size)}" for name, size in held._asdict().items() if size]
        yield f"  of a micro-batch's activations: {', '.join(parts)}"


def _named(plan: Plan, name: str) -> Option | None:
    return next((option for option in plan.options if option.name == name), None)


def _cells(simulation: Simulation, slowest: float | None) -> tuple[str, str, str]:
    faster = f"{slowest / simulation.seconds:.3f}x" if slowest is not None and simulation.seconds else ""
    return format_bytes(simulation.reserved), format_seconds(simulation.seconds), faster


def _layer(plan: Plan, layer: int) -> tuple[tuple[object, ...], str]:
    """A key that is equal for layers treated alike, and the treatment in words.

    By operator where the plan says what each holds; otherwise as the Policy is written.
    """
    if not plan.operators:
        policy = plan.policy.layers[layer]
        return (policy,), _written(policy)
    named: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    for one in plan.operators[layer]:
        kind = decision_kind(one.decision)
        named.setdefault(kind, []).append(one.name)
        sizes[kind] = sizes.get(kind, 0) + one.bytes
    key = tuple((kind, tuple(names)) for kind, names in sorted(named.items()))
    if len(named) == 1:
        return key, f"{next(iter(named))} everything"
    parts = [
        f"{kind} {_some(named[kind])} ({format_bytes(sizes[kind])})" for kind in ("recompute", "swap") if kind in named
    ]
    return key, ", ".join([*parts, "keep the rest"] if "keep" in named else parts)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return " ".join(names[:_NAMED]) + more


def _written(layer: LayerPolicy) -> str:
    word = (
        "recompute" if isinstance(layer.default, Recompute) else "swap" if isinstance(layer.default, Swap) else "keep"
    )
    rules = len(layer.rules)
    return f"{word} everything" + (f", with {rules} rule{'s' if rules > 1 else ''} for operators" if rules else "")

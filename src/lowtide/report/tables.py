"""The parts of a page that are text: figures, tables, the difference of two files."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from html import escape

from lowtide.planner.plan import Option, Plan
from lowtide.policy import format_layers
from lowtide.report.run import Run
from lowtide.report.thin import late_copies
from lowtide.report.words import fullest, held_by_decision, recommended, shares_by_operator, shown_options
from lowtide.units import format_bytes, format_seconds

__all__ = [
    "decision_bar",
    "decision_legend",
    "key_figures",
    "lanes_legend",
    "listed",
    "options_table",
    "receipt_table",
    "run_figures",
    "sections_of",
    "shares_table",
    "yaml_difference",
]

_LARGEST = 12
_SHARE_COLOURS = {"parameters": "deep", "gradients": "deep", "optimizer": "deep", "transients": "compute"}


def key_figures(plan: Plan) -> str:
    """The handful of numbers that sum a plan up."""
    stages, step = plan.simulation.stages, plan.simulation.seconds
    again, stall = max(stage.recompute for stage in stages), max(stage.stall for stage in stages)
    most = " on one stage" if len(stages) > 1 else ""
    spare = plan.budget - plan.simulation.reserved
    moved, host = sum(stage.moved for stage in stages), max(stage.host_peak for stage in stages)
    copies = [span for stage in stages for span in stage.spans if span.kind == "copy back"]
    late = sum(len(late_copies(stage.spans)) for stage in stages)
    rows = [
        (
            "Reserved memory",
            format_bytes(plan.simulation.reserved),
            f"{format_bytes(abs(spare))} {'under' if spare >= 0 else 'over'} the budget" if plan.bounded else "",
        ),
        ("Step", format_seconds(step), f"at most {plan.gap:.2%} from the best" if plan.gap is not None else ""),
        ("Recompute", format_seconds(again) if again else "none", f"{_share(again, step)} of the step{most}"),
    ]
    if plan.tokens_per_second is not None:
        each = f"{plan.tokens_per_second / max(plan.workload.devices, 1):,.0f} a device"
        rows.append(("Tokens a second", f"{plan.tokens_per_second:,.0f}", each if plan.workload.devices > 1 else ""))
    if plan.mfu is not None:
        rows.append(("MFU", f"{plan.mfu:.1%}", f"of the peak in {plan.workload.compute_dtype}"))
    if moved:
        on_time = f", {(len(copies) - late) / len(copies):.0%} of copies back in time" if copies else ""
        rows.append(("Swapped in a step", format_bytes(moved), f"{format_bytes(host)} on the host at most{on_time}"))
        stalled = (format_seconds(stall), f"{_share(stall, step)} of the step{most}")
        rows.append(("Waiting for copies", *(stalled if stall else ("no stalls", ""))))
    if len(stages) > 1:
        rows.append(("Pipeline bubble", f"{plan.simulation.bubble:.1%}", "of the step, on the busiest stage"))
    return _figures(rows)


def run_figures(run: Run) -> str:
    """The same for a run that there is no plan of."""
    moved, stall = sum(row.moved for row in run.settings), sum(row.stall for row in run.settings)
    again = sum(row.recompute for row in run.settings)
    steps = f"in {run.steps} steps" if run.steps > 1 else ""
    rows = [
        ("Peak in use", format_bytes(run.peak) if run.peak is not None else "", "measured"),
        ("Step", format_seconds(run.seconds) if run.seconds is not None else "", "measured, the median"),
        ("Swapped", format_bytes(moved) if moved else "", steps),
        ("Recompute", format_seconds(again) if again else "", steps),
        ("Waiting for copies", (format_seconds(stall) if stall else "no stalls") if run.settings else "", steps),
    ]
    return _figures([row for row in rows if row[1]])


def _figures(rows: Iterable[tuple[str, str, str]]) -> str:
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for name, value, more in rows
    )
    return f'<dl class="figures">{cells}</dl>'


def decision_bar(plan: Plan) -> str:
    """What becomes of a micro-batch's activations, as one bar."""
    held = {name: size for name, size in held_by_decision(plan)._asdict().items() if size}
    total = sum(held.values())
    if not total:
        return ""
    parts = "".join(f'<i class="{name}" style="flex:{size / total:.4f}"></i>' for name, size in held.items())
    words = {"keep": "kept", "recompute": "recomputed", "swap": "swapped to the host"}
    legend = "".join(
        f'<li class="chip {name}"><b>{format_bytes(size)}</b> {words[name]}</li>' for name, size in held.items()
    )
    label = escape(", ".join(f"{format_bytes(size)} {words[name]}" for name, size in held.items()))
    note = "<li>of the activations of one micro-batch, all layers</li>"
    return f'<div class="bar" role="img" aria-label="{label}">{parts}</div><ul class="legend">{legend}{note}</ul>'


def decision_legend() -> str:
    """The colours of the grid."""
    return _legend((("keep", "keep"), ("recompute", "recompute"), ("swap", "swap")))


def lanes_legend() -> str:
    """The colours of the lanes."""
    names = {"compute": "forward", "deep": "backward", "recompute": "recompute", "swap": "copy in time"}
    return _legend((*names.items(), ("alarm", "stall, and the copy that was waited for")))


def _legend(chips: Iterable[tuple[str, str]]) -> str:
    return '<ul class="legend">' + "".join(f'<li class="chip {kind}">{name}</li>' for kind, name in chips) + "</ul>"


def options_table(plan: Plan) -> str:
    """The options, the fastest first."""
    best = recommended(plan)
    rows = "".join(_option(option, plan, option is best) for option in shown_options(plan))
    head = _head(("option", ""), ("reserved", "number"), ("budget", "number"), ("step", "number"))
    return f'<div class="scroll"><table class="options">{head}{rows}</table></div>' if rows else ""


def _option(option: Option, plan: Plan, best: bool) -> str:
    spare = plan.budget - option.simulation.reserved
    against = f"{format_bytes(spare)} free" if spare >= 0 else f'<span class="over">{format_bytes(-spare)} over</span>'
    against = against if plan.bounded else "none"
    how = f"<small>write: {escape(option.how)}</small>" if option.how else ""
    name = f"<span>{escape(option.name)}</span>{how}"
    mark = ' class="best"' if best else ""
    return (
        f"<tr{mark}><td>{name}</td>"
        f'<td class="number">{format_bytes(option.simulation.reserved)}</td><td class="number">{against}</td>'
        f'<td class="number">{format_seconds(option.simulation.seconds)}</td></tr>'
    )


def shares_table(plan: Plan) -> str:
    """The largest parts of the highest peak."""
    stage = fullest(plan)
    rows = shares_by_operator(stage.shares)
    if not rows:
        return ""
    largest = max(row[3] for row in rows)
    body = "".join(
        _share_row(
            what, operator or "", f"{format_layers(layers)[:60]}" if layers else "", size, size / largest, stage.peak
        )
        for what, operator, layers, size in rows[:_LARGEST]
    )
    rest = sum(row[3] for row in rows[_LARGEST:])
    if rest:
        body += _share_row("", f"{len(rows) - _LARGEST} smaller", "", rest, rest / largest, stage.peak)
    head = _head(("what", ""), ("layers", "wide"), ("bytes", "number"), ("of the peak", "number"), ("", "wide"))
    return f'<div class="scroll"><table>{head}{body}</table></div>'


def _share_row(what: str, operator: str, layers: str, size: int, length: float, peak: int) -> str:
    colour = _SHARE_COLOURS.get(what, "keep" if what else "mute")
    kind = f' <span class="soft">{escape(what)}</span>' if operator and what else escape(what)
    track = f'<span class="track"><i class="{colour}" style="width:{min(length, 1):.1%}"></i></span>'
    return (
        f'<tr><td>{escape(operator)}{kind}</td><td class="wide">{escape(layers)}</td>'
        f'<td class="number">{format_bytes(size)}</td><td class="number">{size / peak:.1%}</td>'
        f'<td class="wide">{track}</td></tr>'
    )


def receipt_table(run: Run) -> str:
    """What each setting did in the run."""
    rows = "".join(
        f"<tr><td><code>{escape(row.setting)}</code> {escape(row.action)}</td><td>{escape(row.layers)}</td>"
        f'<td class="number">{format_bytes(row.moved) if row.moved else ""}</td>'
        f'<td class="number">{format_bytes(row.freed) if row.freed is not None else "?"}</td>'
        + "".join(
            f'<td class="number">{format_seconds(seconds) if seconds else ""}</td>'
            for seconds in (row.copy, row.stall, row.recompute)
        )
        + f"<td>{escape('; '.join(row.notes))}</td></tr>"
        for row in run.settings
    )
    names = ("moved", "freed", "copy", "stall", "recompute")
    head = _head(("setting", ""), ("layers", ""), *((name, "number") for name in names), ("remarks", ""))
    lost = "".join(f"<li>{escape(line)}</li>" for line in run.without_effect)
    more = f"<h3>Without effect</h3><ul>{lost}</ul>" if lost else ""
    return f'<div class="scroll"><table>{head}{rows}</table></div>{more}'


def yaml_difference(plan: Plan, given: str | None) -> str:
    """What to change in a file; all of it where there is none."""
    if not plan.yaml:
        return ""
    if given is None:
        return f"<pre>{escape(plan.yaml.rstrip())}</pre>"
    before, after = sections_of(given, plan.yaml).splitlines(), plan.yaml.rstrip().splitlines()
    lines = list(difflib.unified_diff(before, after, "the file", "the plan", lineterm="", n=3))
    if not lines:
        return "<p>The file says this already.</p>"
    classes = {"+": "add", "-": "drop", "@": "at"}
    return "<pre>" + "\n".join(_difference_line(line, classes) for line in lines) + "</pre>"


def _difference_line(line: str, classes: dict[str, str]) -> str:
    colour = "at" if line.startswith(("+++", "---")) else classes.get(line[:1], "")
    return f'<span class="{colour}">{escape(line)}</span>' if colour else escape(line)


def sections_of(text: str, like: str) -> str:
    """The top-level sections of a YAML text that another one has too, as they are written."""
    wanted = {name for name, _ in _sections(like)}
    return "\n".join(line for name, lines in _sections(text) if name in wanted for line in lines)


def _sections(text: str) -> list[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        starts = bool(line) and not line[0].isspace() and line[0] not in "#-" and ":" in line
        if starts:
            found.append((line.partition(":")[0].strip(), [line]))
        elif found and line.strip() and not line.startswith("#"):
            found[-1][1].append(line)
    return found


def _head(*columns: tuple[str, str]) -> str:
    cells = "".join(f'<th class="{kind}">{name}</th>' if kind else f"<th>{name}</th>" for name, kind in columns)
    return f"<tr>{cells}</tr>"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "0%"


def listed(lines: Sequence[str]) -> str:
    """Sentences as a list."""
    items = "".join(f"<li>{escape(line[:1].upper() + line[1:])}</li>" for line in lines)
    return f"<ul>{items}</ul>" if lines else ""

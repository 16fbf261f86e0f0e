"""One offline HTML file from a plan, from a run, or from both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path

from lowtide.errors import ReportError
from lowtide.planner.plan import Plan
from lowtide.planner.simulation import StageSimulation
from lowtide.report.adapt_page import adaptive_events, adaptive_figures, adaptive_sentence
from lowtide.report.axes import Figure
from lowtide.report.charts import curve_figure, grid_figure, stage_memory_figure, stage_time_figure
from lowtide.report.frame import chart, framed, section, two, unbroken
from lowtide.report.layouts import LayoutsFound, layouts_table
from lowtide.report.prediction import measured_stage, predictions
from lowtide.report.run import Run
from lowtide.report.tables import (
    decision_bar,
    decision_legend,
    key_figures,
    lanes_legend,
    listed,
    options_table,
    receipt_table,
    run_figures,
    shares_table,
    yaml_difference,
)
from lowtide.report.thin import MOST_BLOCKS, SLICES, late_copies
from lowtide.report.timelines import lanes_figure, memory_figure
from lowtide.report.words import fullest, headline, layout, peak_sentence, policy_snippet
from lowtide.units import format_bytes, format_seconds

__all__ = ["make_page", "write_page"]


def write_page(
    file: str | Path,
    plan: Plan | None = None,
    run: Run | None = None,
    given: str | None = None,
    layouts: LayoutsFound | None = None,
) -> None:
    """Write the page of a plan, a run, or both into a file; ``given`` is the text of the YAML file that was planned,
    ``layouts`` what the plan's layout was chosen from."""
    Path(file).write_text(make_page(plan, run, given, layouts), encoding="utf-8")


def make_page(
    plan: Plan | None = None, run: Run | None = None, given: str | None = None, layouts: LayoutsFound | None = None
) -> str:
    """The page as HTML text. It asks no other host for anything."""
    if plan is None and run is None:
        raise ReportError("a report needs a plan or a run; there is neither")
    figures = _figures(plan, run)
    if run is not None and run.adaptive is not None:
        figures |= adaptive_figures(run.adaptive)
    title = headline(plan) if plan is not None else _run_headline(run)
    body = "".join(_sections(plan, run, given, figures, layouts))
    return framed(title, body, figures)


def _figures(plan: Plan | None, run: Run | None) -> dict[str, Figure | list[Figure]]:
    if plan is None:
        assert run is not None
        end = run.memory[-1][0] if run.memory else 0.0
        return {"memory": [memory_figure(None, None, run, end)]} if run.memory else {}
    found: dict[str, Figure | list[Figure]] = {}
    stages = plan.simulation.stages
    whose = measured_stage(plan, run)
    ends = [_end(stage, run if stage.stage == whose else None) or plan.simulation.seconds for stage in stages]
    budget = plan.budget if plan.bounded else None
    few = max(len(stages) // 4, 1)  # many stages share the page's size: each has coarser slices
    if any(stage.memory for stage in stages) or (run is not None and run.memory):
        found["memory"] = [
            memory_figure(stage, budget, run if stage.stage == whose else None, end, max(SLICES // few, 150))
            for stage, end in zip(stages, ends, strict=True)
        ]
    if any(stage.spans for stage in stages):
        found["lanes"] = [
            lanes_figure(stage, end, max(MOST_BLOCKS // few, 400)) for stage, end in zip(stages, ends, strict=True)
        ]
    if plan.options or plan.curve:
        found["curve"] = curve_figure(plan)
    if plan.operators:
        found["grid"] = grid_figure(plan)
    found["stage_memory"] = stage_memory_figure(plan)
    found["stage_time"] = stage_time_figure(plan)
    return found


def _end(stage: StageSimulation, run: Run | None) -> float:
    """Where a stage's timeline ends. Several stages are simulated one by one, so each has a clock of its own."""
    times = [moment.time for moment in stage.memory[-1:]] + [span.start + span.seconds for span in stage.spans]
    return max([*times, *(when for when, _ in (run.memory[-1:] if run is not None else ()))], default=0.0)


def _sections(
    plan: Plan | None,
    run: Run | None,
    given: str | None,
    figures: dict[str, Figure | list[Figure]],
    layouts: LayoutsFound | None,
) -> Iterator[str]:
    yield _header(plan, run)
    if layouts is not None:
        yield section("layouts", "Layouts", f"{layouts.sentence}.", layouts_table(layouts))
    if run is not None and run.adaptive is not None:
        charts = [
            chart(name, label)
            for name, label in (("adapt_time", "time of each step"), ("adapt_memory", "most reserved in each step"))
            if name in figures
        ]
        lead = adaptive_sentence(run.adaptive)
        yield section("adapt", "How the run adapted itself", lead, "".join(charts) + adaptive_events(run.adaptive))
    if "memory" in figures:
        yield _memory(plan, run, figures)
    if plan is not None and "curve" in figures:
        yield section(
            "options",
            "Options",
            "The line is the fastest step for each budget by the solver's model. The points are simulated; hollow ones"
            " do not fit.",
            two(chart("curve", "step time against memory"), options_table(plan)),
        )
    if plan is not None and "grid" in figures:
        yield section(
            "grid",
            "Layer by layer",
            "What becomes of what each operator holds for backward. Operators that hold nothing are left out.",
            decision_legend() + chart("grid", "decisions by layer and operator"),
        )
    if plan is not None:
        several = len(plan.simulation.stages) > 1
        yield section(
            "stages",
            "Pipeline stages" if several else "The device",
            "Memory at each stage's peak, and its time in a step."
            if several
            else "Its memory at the peak, and its step.",
            two(chart("stage_memory", "memory of each stage"), chart("stage_time", "time of each stage")),
        )
        yield section("peak", "What the peak is made of", peak_sentence(plan), shares_table(plan))
    if run is not None and run.settings:
        covered = f"In {run.steps} steps, as the runtime counted." if run.steps else "As the runtime counted."
        yield section("run", "What the run did", covered, receipt_table(run))
    if plan is not None:
        yield _use(plan, given)
    yield _honesty(plan, run)


def _use(plan: Plan, given: str | None) -> str:
    """The Policy in Python, and as MindSpore YAML where it can be written so."""
    policy = json.dumps(plan.policy.as_json(), indent=1)
    body = (
        f"<pre>{escape(policy_snippet().rstrip())}</pre>"
        f"<details><summary>policy.json, which `lowtide plan … -o policy.json` writes</summary>"
        f"<pre>{escape(policy)}</pre></details>"
    )
    if plan.yaml:
        against = "" if given is None else ", against the file"
        body += f"<h3>As MindSpore YAML{against}</h3>{yaml_difference(plan, given)}"
    lead = "In Python:" if plan.feasible else "It does not fit the budget. The Policy that needs least, in Python:"
    return section("use", "How to use it", lead, body)


def _header(plan: Plan | None, run: Run | None) -> str:
    if plan is None:
        assert run is not None
        title = unbroken(escape(_run_headline(run)))
        return f'<header><p class="where"><b>lowtide</b> · a run</p><h1>{title}</h1></header>\n{run_figures(run)}'
    mark = "" if plan.feasible else ' class="no"'
    return (
        f'<header><p class="where"><b>lowtide</b> · {escape(plan.model)} · {escape(layout(plan))}</p>'
        f"<h1{mark}>{unbroken(escape(headline(plan)))}</h1></header>\n{key_figures(plan)}{decision_bar(plan)}\n"
    )


def _run_headline(run: Run | None) -> str:
    assert run is not None
    parts = [f"{format_bytes(run.peak)} at the peak"] if run.peak is not None else []
    parts += [f"{format_seconds(run.seconds)} a step"] if run.seconds is not None else []
    return f"The run took {' and '.join(parts)}" if parts else "What lowtide did in the run"


def _memory(plan: Plan | None, run: Run | None, figures: dict[str, Figure | list[Figure]]) -> str:
    chooser, lead = "", "Measured bytes in use."
    if plan is not None:
        stages = plan.simulation.stages
        first = fullest(plan).stage
        lead = "Bytes in use on the device, as the allocator counts them; the budget is compared with what it reserves."
        if len(stages) > 1:
            lead += (
                " Each stage is shown on a clock of its own, with as many micro-batches as it takes to fill it; the"
                " time in which it waits for others is left out."
            )
            options = "".join(
                f"<option{' selected' if stage.stage == first else ''}>stage {stage.stage}, "
                f"{format_bytes(stage.peak)}</option>"
                for stage in stages
            )
            chooser = f'<label class="stage">shown: <select id="stage">{options}</select></label>'
    body = chooser + f'<p class="lead">{escape(lead)}</p>' + chart("memory", "memory over the step")
    if plan is not None and "lanes" in figures:
        lanes = chart("lanes", "what the device and the link do over the step")
        body += f'<h3>Device and link</h3><p class="lead">{escape(_link_sentence(plan))}</p>{lanes_legend()}{lanes}'
    return f'<section id="memory"><h2>Memory over the step</h2>{body}</section>\n'


def _link_sentence(plan: Plan) -> str:
    spans = [(stage, span) for stage in plan.simulation.stages for span in stage.spans]
    copies = sum(span.kind == "copy back" for _, span in spans)
    if not copies:
        return "Nothing is swapped: the link is idle."
    late = sum(len(late_copies(stage.spans)) for stage in plan.simulation.stages)
    stalled = sum(span.seconds for _, span in spans if span.kind == "stall")
    busiest = max(
        sum(span.seconds for span in stage.spans if span.kind == "copy out") / (_end(stage, None) or 1.0)
        for stage in plan.simulation.stages
    )
    waits = f"compute waited {format_seconds(stalled)} for copies" if stalled else "no stalls"
    return (
        f"{copies - late} of {copies} copies back were there when the computation needed them; {waits}."
        f" The busiest link is sending in {busiest:.0%} of the time."
        " Faint blocks are busy for a part of their length only."
    )


def _honesty(plan: Plan | None, run: Run | None) -> str:
    lines: list[str] = []
    notes: list[str] = []
    if plan is not None:
        lines += list(_errors(plan, run))
        if plan.bound is not None and plan.gap is not None:
            lines.append(
                f"As the simulator counts, no policy that fits takes less than {format_seconds(plan.bound)} a step;"
                f" the plan is {plan.gap:.2%} above that. The solver took {format_seconds(plan.solve_seconds)}."
            )
        notes += [*plan.notes, *plan.simulation.notes]
    elif run is not None:
        lines.append("Everything on this page was measured; there is no plan to compare it with.")
    assumed = f"<h3>Assumed</h3>{listed(list(dict.fromkeys(notes)))}" if notes else ""
    return f'<div class="honesty" id="honesty"><h2>How far to trust this</h2>{listed(lines)}{assumed}</div>\n'


def _errors(plan: Plan, run: Run | None) -> Iterator[str]:
    """The predictions compared with what was measured, or a line that nothing was measured."""
    if run is None or (run.peak is None and run.seconds is None):
        yield "All of this is predicted. Nothing on this page was measured on a device."
        return
    for one in predictions(plan, run):
        if one.measured is None or one.error is None:
            yield f"The {one.what} was not measured."
            continue
        words = [
            format_bytes(int(n)) if one.what == "peak" else format_seconds(n) for n in (one.predicted, one.measured)
        ]
        yield f"The {one.what} was predicted as {words[0]} and measured as {words[1]}: {one.error:+.1%}."

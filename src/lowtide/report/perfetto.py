"""A simulated step for https://ui.perfetto.dev or chrome://tracing: every span, and memory as a counter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lowtide.planner.simulation import Simulation, Span, StageSimulation

__all__ = ["perfetto_events", "write_perfetto"]

LANES = ("compute", "link out", "link in", "communication")


def write_perfetto(simulation: Simulation, file: str | Path) -> None:
    """Write the trace into a file."""
    value = {"displayTimeUnit": "ms", "traceEvents": list(perfetto_events(simulation))}
    Path(file).write_text(json.dumps(value, separators=(",", ":")) + "\n", encoding="utf-8")


def perfetto_events(simulation: Simulation) -> Iterator[dict[str, Any]]:
    """The events of the Trace Event format: stages are processes, lanes are threads. Times are microseconds."""
    for stage in simulation.stages:
        yield _name("process_name", stage, 0, f"stage {stage.stage}")
        yield {**_name("process_sort_index", stage, 0, ""), "args": {"sort_index": stage.stage}}
        for place, lane in enumerate(LANES):
            yield _name("thread_name", stage, place, lane)
        for moment in stage.memory:
            yield {
                "ph": "C",
                "name": "memory in use",
                "pid": stage.stage,
                "ts": moment.time * 1e6,
                "args": {"bytes": moment.allocated},
            }
        for span in stage.spans:
            yield _span(stage, span)


def _name(what: str, stage: StageSimulation, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": stage.stage, "tid": thread, "args": {"name": name}}


def _span(stage: StageSimulation, span: Span) -> dict[str, Any]:
    layer = f"layer {span.layer} " if span.layer is not None else ""
    arguments: dict[str, Any] = {"layer": span.layer, "operator": span.operator, "micro_batch": span.micro_batch}
    if span.bytes:
        arguments["bytes"] = span.bytes
    return {
        "ph": "X",
        "cat": span.kind,
        "name": f"{span.kind} {layer}{span.operator}".rstrip(),
        "pid": stage.stage,
        "tid": LANES.index(span.lane),
        "ts": span.start * 1e6,
        "dur": span.seconds * 1e6,
        "args": arguments,
    }

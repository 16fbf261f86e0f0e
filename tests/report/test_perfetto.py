from __future__ import annotations

import json
from pathlib import Path

from lowtide.report.perfetto import perfetto_events, write_perfetto
from support.plan_cases import llama_plan

SIMULATION = llama_plan(4, 2, 2).simulation


def test_stages_are_processes_and_lanes_are_threads() -> None:
    events = list(perfetto_events(SIMULATION))
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"} == {0: "stage 0", 1: "stage 1"}
    assert [names[1, thread] for thread in range(3)] == ["compute", "link out", "link in"]
    assert {e["cat"] for e in events if e["ph"] == "X" and names[e["pid"], e["tid"]] == "link in"} == {"copy back"}


def test_every_span_and_every_moment_is_there_in_microseconds() -> None:
    events = list(perfetto_events(SIMULATION))
    for stage in SIMULATION.stages:
        mine = [event for event in events if event["pid"] == stage.stage]
        spans = [event for event in mine if event["ph"] == "X"]
        assert [(e["ts"], e["dur"]) for e in spans] == [(s.start * 1e6, s.seconds * 1e6) for s in stage.spans]
        counted = [event["args"]["bytes"] for event in mine if event["ph"] == "C"]
        assert counted == [moment.allocated for moment in stage.memory]
        assert max(counted) == stage.peak


def test_a_span_says_what_it_is(tmp_path: Path) -> None:
    write_perfetto(SIMULATION, tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    copy = next(event for event in events if event.get("cat") == "copy out")
    assert copy["name"] == f"copy out layer {copy['args']['layer']} {copy['args']['operator']}"
    assert copy["args"]["bytes"] > 0

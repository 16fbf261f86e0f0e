"""What a run's own files say about it: receipts, the steps' metrics, and memory over time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from lowtide.adaptive.record import RECORD_FILE, AdaptRecord, load_record
from lowtide.errors import ReportError
from lowtide.planner.plan import Plan
from lowtide.planner.plan_file import load_plan
from lowtide.policy import format_layers

__all__ = ["Run", "SettingRow", "read_directory", "read_run"]


class SettingRow(NamedTuple):
    """What one setting did, as a receipt has it."""

    setting: str
    action: str
    layers: str
    freed: int | None
    moved: int
    copy: float
    stall: float
    recompute: float
    notes: tuple[str, ...]


class Run(NamedTuple):
    """What was measured."""

    settings: tuple[SettingRow, ...] = ()
    """From the last receipt of each rank."""
    without_effect: tuple[str, ...] = ()
    steps: int = 0
    """The steps that the receipts cover; 0 where they do not say."""
    seconds: float | None = None
    """Of a step: the median after the first two, in which layers are still being profiled."""
    peak: int | None = None
    """The most bytes in use on the device."""
    memory: tuple[tuple[float, int], ...] = ()
    """Seconds since the step began, and bytes in use."""
    stage: int | None = None
    """The pipeline stage that ``memory`` is of."""
    adaptive: AdaptRecord | None = None
    """What the run decided and met, where it adapted itself."""


def read_run(
    receipts: Iterable[Path] = (), metrics: Path | None = None, memory: Path | None = None, stage: int | None = None
) -> Run:
    """Read a run's files.

    A receipt file holds one ``Receipt.as_json()``, or a line each as the runner writes them, of which the last counts.
    A memory file holds a list of ``[seconds, bytes]``.
    """
    rows: list[SettingRow] = []
    without: dict[str, None] = {}
    steps: set[int] = set()
    for file in receipts:
        last, covered = _last_receipt(file)
        rows += [_row(file, one) for one in last["settings"]]
        without.update(dict.fromkeys(map(str, last.get("without_effect", ()))))
        steps.add(covered)
    points = _points(memory) if memory is not None else ()
    records = _json_lines(metrics) if metrics is not None else []
    later = [one["seconds"] for one in records[2:] if isinstance(one.get("seconds"), (int, float))]
    peaks = [one["peak_bytes"] for one in records if isinstance(one.get("peak_bytes"), int)]
    peaks += [size for _, size in points]
    return Run(
        tuple(rows),
        tuple(without),
        steps.pop() if len(steps) == 1 else 0,
        median(later) if later else None,
        max(peaks, default=None),
        points,
        stage,
    )


def read_directory(directory: Path) -> tuple[Plan | None, Run]:
    """The plan and the files of a run directory: what an adaptive run wrote of itself, receipts, metrics."""
    record = directory / RECORD_FILE
    metrics = directory / "metrics.jsonl"
    receipts = sorted(directory.glob("receipts*.jsonl"))
    if not record.exists() and not metrics.exists() and not receipts:
        raise ReportError(
            f"{directory} is not the directory of a run: it has neither {RECORD_FILE} nor metrics.jsonl nor receipts;"
            " give what `output_dir` says"
        )
    run = read_run(receipts, metrics if metrics.exists() else None)
    if not record.exists():
        return None, run
    adaptive = load_record(record)
    plan = load_plan(directory / adaptive.plan) if adaptive.plan is not None else None
    return plan, _since_the_plan(run._replace(adaptive=adaptive), adaptive, metrics)


def _since_the_plan(run: Run, adaptive: AdaptRecord, metrics: Path) -> Run:
    """The run with the time and the peak of its steps under the last plan only: those are what it predicts."""
    switches = [event.step for event in adaptive.events if event.kind == "switched"]
    if not switches:
        return run
    seconds = [one.seconds for one in adaptive.steps if one.step > switches[-1] and not one.rescued]
    lines = _json_lines(metrics) if metrics.exists() else []
    later = [one for one in lines if isinstance(one.get("step"), int) and one["step"] > switches[-1]]
    peaks = [one["peak_bytes"] for one in later if isinstance(one.get("peak_bytes"), int)]
    return run._replace(seconds=median(seconds) if seconds else None, peak=max(peaks, default=None))


def _last_receipt(file: Path) -> tuple[Mapping[str, Any], int]:
    """The last receipt of a file, and how many steps it covers."""
    lines = _json_lines(file)
    last = lines[-1]
    if not isinstance(last.get("settings"), list):
        raise ReportError(f"{file} is not a receipt: expected an object with settings, as Receipt.as_json() gives")
    numbers = [line["step"] for line in lines if isinstance(line.get("step"), int)]
    earlier = [number for number in numbers if number < numbers[-1]]
    return last, numbers[-1] - (earlier[-1] if earlier else 0) if numbers else 0


def _row(file: Path, one: Mapping[str, Any]) -> SettingRow:
    try:
        return SettingRow(
            one["setting"],
            one["action"],
            format_layers(one["layers"]),
            one["freed_bytes"],
            one["moved_bytes"],
            one["copy_seconds"],
            one["stall_seconds"],
            one["recompute_seconds"],
            tuple(one["notes"]),
        )
    except (KeyError, TypeError) as error:
        raise ReportError(f"{file} is not a receipt: a setting has no {error}") from None


def _points(file: Path) -> tuple[tuple[float, int], ...]:
    value = _read(file)
    try:
        points: Sequence[Any] = json.loads(value)
        return tuple((float(seconds), int(size)) for seconds, size in points)
    except (TypeError, ValueError, RecursionError) as error:
        raise ReportError(f"{file} is not a memory timeline: expected a list of [seconds, bytes]; {error}") from None


def _json_lines(file: Path) -> list[Mapping[str, Any]]:
    """One object, or one a line."""
    text = _read(file)
    try:
        try:
            values = [json.loads(text)]
        except ValueError:
            values = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{file} is neither JSON nor JSON lines: {error}") from None
    if not values or not all(isinstance(one, Mapping) for one in values):
        raise ReportError(f"{file}: expected a JSON object, or one a line")
    return values


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{file}: {getattr(error, 'strerror', None) or error}") from None

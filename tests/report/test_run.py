from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import ReportError
from lowtide.report.run import read_run
from lowtide.runtime.receipt import Receipt, SettingReceipt

SETTING = SettingReceipt(
    setting=r"feed_forward\.w1",
    action="swap(6)",
    layers=(0, 1, 2),
    operators=("feed_forward.w1",),
    freed_bytes=1024,
    moved_bytes=2048,
    kept_bytes=0,
    copy_seconds=0.5,
    stall_seconds=0.25,
    recompute_seconds=0.0,
    notes=("kept (1 x)",),
)
RECEIPT = Receipt((SETTING,), (), ("nothing (recompute) has no effect",))


def written(file: Path, *values: Any) -> Path:
    file.write_text("\n".join(map(json.dumps, values)) + "\n")
    return file


def test_a_receipt_is_read_as_the_runtime_writes_it(tmp_path: Path) -> None:
    run = read_run([written(tmp_path / "receipt.json", RECEIPT.as_json())])
    (row,) = run.settings
    assert (row.setting, row.action, row.layers) == (r"feed_forward\.w1", "swap(6)", "0-2")
    assert (row.freed, row.moved, row.copy, row.stall) == (1024, 2048, 0.5, 0.25)
    assert run.without_effect == ("nothing (recompute) has no effect",)
    assert run.steps == 0


def test_of_the_runners_receipts_the_last_counts_and_covers_the_steps_since_the_one_before(tmp_path: Path) -> None:
    lines = [{"step": step, "layers": [0], **RECEIPT.as_json()} for step in (2, 100, 130)]
    assert read_run([written(tmp_path / "receipts.jsonl", *lines)]).steps == 30


def test_metrics_give_the_median_step_after_the_first_two_and_the_highest_peak(tmp_path: Path) -> None:
    figures = [(9.0, 5), (8.0, 70), (1.0, 6), (3.0, 7), (2.0, 6)]
    steps = [{"seconds": seconds, "peak_bytes": peak} for seconds, peak in figures]
    run = read_run(metrics=written(tmp_path / "metrics.jsonl", *steps))
    assert (run.seconds, run.peak) == (2.0, 70)


def test_a_memory_timeline_gives_the_peak_too(tmp_path: Path) -> None:
    run = read_run(memory=written(tmp_path / "memory.json", [[0.0, 10], [0.5, 30], [1, 20]]), stage=1)
    assert run.memory == ((0.0, 10), (0.5, 30), (1.0, 20))
    assert (run.peak, run.stage) == (30, 1)


@pytest.mark.parametrize("text", ["", "[]", "{}", "no", '{"settings": [{}]}', '{"settings": 3}', "[" * 100_000])
def test_what_is_no_receipt_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "receipts.jsonl"
    file.write_text(text)
    with pytest.raises(ReportError, match=r"receipts\.jsonl"):
        read_run([file])


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[["a", 1]]'])
def test_what_is_no_timeline_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "memory.json"
    file.write_text(text)
    if text == "{}":  # an empty mapping has no points either
        assert read_run(memory=file).memory == ()
        return
    with pytest.raises(ReportError, match=r"memory\.json is not a memory timeline"):
        read_run(memory=file)

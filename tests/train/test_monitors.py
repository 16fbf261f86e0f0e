from __future__ import annotations

import io
import json
import logging
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from lowtide.errors import ConfigError
from lowtide.train.logs import start_logging
from lowtide.train.monitors import Curve, DropRate, JsonLines, LossLine, Profile, ProgressBar, TensorBoard, WandB
from lowtide.train.monitors.loss_line import format_loss_line
from lowtide.train.monitors.scalars import scalars
from support.step_records import record


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="lowtide")
    return caplog


def test_the_loss_line_is_the_references() -> None:
    assert format_loss_line(record(learning_rate=0.0)) == (
        "{ Epoch:[  1/  2], step:[    1/   10], loss: 10.649000, per_step_time: 250ms, lr: 0.0, "
        "overflow cond: False, loss_scale: 1.0, global_norm: [44.313248]"
    )
    later = format_loss_line(record(12, global_norm=None, overflow=True, loss_scale=65536.0, learning_rate=9.981e-06))
    assert later.startswith(
        "{ Epoch:[  2/  2], step:[    2/   10], loss: 0.887417, per_step_time: 250ms, lr: 9.981e-06,"
    )
    assert later.endswith("overflow cond: True, loss_scale: 65536.0, global_norm: None")


def test_parts_of_the_loss_are_shown_with_it_when_asked_for() -> None:
    losses = {"lm": 2.5, "mtp": 0.25}
    assert "loss: 2.750000, lm_loss: 2.500000, mtp_loss: 0.250000, per" in format_loss_line(
        record(loss=2.75, losses=losses), separate=True
    )
    assert "lm_loss" not in format_loss_line(record(losses=losses))


def test_the_loss_is_logged_every_so_many_steps_and_at_the_end(lines: pytest.LogCaptureFixture) -> None:
    monitor = LossLine(every=8, samples_per_step=8, ranks=4)
    for step in range(1, 21):
        monitor.step(record(step))
    first = [line for line in lines.messages if "Epoch" in line]
    assert [line.split("step:[")[1][:5] for line in first] == ["    8", "    6", "   10"]
    # 8 samples on 4 ranks in a quarter of a second; 12 steps are left.
    assert lines.messages[1] == f"  40.0% |{'█' * 20}{' ' * 30}| 8.00000 samples/s/p, 16,384 tokens/s  0:00:03 }}"
    monitor.step(record(8, mfu=0.4131))
    assert lines.messages[-1].endswith("| 8.00000 samples/s/p, 16,384 tokens/s, MFU 41.3%  0:00:03 }")


def test_drop_rates_are_logged_as_documented(lines: pytest.LogCaptureFixture) -> None:
    DropRate().step(record(drop_rates={3: 0.325, 1: 0.0}))
    assert lines.messages == ["layer: 1, drop_rate: 0.00000", "layer: 3, drop_rate: 0.32500"]


def test_each_step_is_in_the_metrics_exactly_once_after_any_interruption(tmp_path: Path) -> None:
    file = tmp_path / "run" / "metrics.jsonl"

    def run(first: int, last: int) -> None:
        monitor = JsonLines(file, after=first - 1)
        for step in range(first, last + 1):
            monitor.step(record(step, loss=float(last)))
        monitor.close()

    run(1, 7)
    with file.open("a") as stream:
        stream.write('{"step": 8, "lo')  # killed while writing
    run(5, 9)  # the newest checkpoint was of step 4
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert [one["step"] for one in found] == list(range(1, 10))
    assert [one["loss"] for one in found] == [7.0] * 4 + [9.0] * 5
    run(1, 2)
    assert len(file.read_text().splitlines()) == 2


def test_a_step_can_be_read_before_the_run_ends(tmp_path: Path) -> None:
    monitor = JsonLines(tmp_path / "metrics.jsonl")
    monitor.step(record(1, loss=float("nan"), drop_rates={2: 0.5}))
    value = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert value["loss"] is None  # JSON has no word for it
    assert value["drop_rates"] == {"2": 0.5}
    assert value["samples"] == 8
    monitor.close()


def test_log_lines_stay_whole_above_the_progress_bar(tmp_path: Path) -> None:
    logs = start_logging(0, tmp_path)
    assert logs.console is not None
    logs.console.file = stream = io.StringIO()
    logs.console._force_terminal = True
    bar = ProgressBar(logs.console)
    for step in (1, 2):
        bar.step(record(step))
        logging.getLogger("lowtide.test").info("line %d %s", step, "x" * 200)
    bar.close()
    logs.close()
    shown = stream.getvalue()
    assert f"INFO - line 1 {'x' * 200}\n" in shown
    assert "2/20" in shown
    assert "16,384 tokens/s" in shown


def test_there_is_no_bar_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    for console in (Console(file=stream), None):
        bar = ProgressBar(console)
        bar.step(record())
        bar.close()
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("package", "extra"), [("torch.utils.tensorboard", "tensorboard"), ("wandb", "wandb")])
def test_a_package_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(ConfigError, match=rf"pip install 'lowtide\[{extra}\]'"):
        TensorBoard(tmp_path) if extra == "tensorboard" else WandB(tmp_path, identity="a")


def test_curves_have_what_a_step_has() -> None:
    values = scalars(record(losses={"lm": 2.0}, drop_rates={1: 0.5}, peak_bytes=7))
    assert values["tokens_per_second"] == 16384
    assert (values["loss/lm"], values["drop_rate/1"], values["peak_bytes"]) == (2.0, 0.5, 7.0)
    assert "global_norm" not in scalars(record(global_norm=None))


def test_tensorboard_gets_every_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monitor = TensorBoard(tmp_path)
    for step in (1, 2):
        monitor.step(record(step))
    monitor.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2]


def test_the_profiled_window_is_written_as_a_trace(tmp_path: Path) -> None:
    monitor = Profile(tmp_path / "profile" / "rank_0.json", begun=0, first=2, last=3, memory=False)
    for step in range(1, 5):
        torch.ones(step)
        monitor.step(record(step))
    monitor.close()
    events = json.loads((tmp_path / "profile" / "rank_0.json").read_text())["traceEvents"]
    assert sum(event.get("name") == "aten::ones" for event in events) == 2


def test_the_curve_says_where_the_loss_went(lines: pytest.LogCaptureFixture) -> None:
    curve = Curve()
    for step in range(1, 1001):
        curve.step(record(step, loss=1000.0 / step))
    curve.close()
    (line,) = lines.messages
    assert line.startswith("loss 1000.0000 -> 1.0000 in 1000 steps")
    assert line[-60] == "█"
    assert line.endswith("▁")

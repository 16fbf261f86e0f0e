from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lowtide.config.check import check_text
from lowtide.errors import RunDirectoryError
from lowtide.train.run_directory import RunDirectory, config_text, digest_of, open_run_directory

ROOT = Path(__file__).parents[2]
SETTINGS = {"model": {"model_config": {"num_layers": 4}}, "output_dir": "./output"}
OTHER = {"model": {"model_config": {"num_layers": 5}}}


def opened(path: Path, settings: dict[str, Any] = SETTINGS, **more: Any) -> RunDirectory:
    checkpoints = sorted((path / "checkpoints").glob("step_*"))
    newest = checkpoints[-1] if checkpoints else None
    return open_run_directory(path, settings=settings, config="a: 1\n", checkpoint=newest, **more)


def leave(run: RunDirectory, step: int | None = None) -> None:
    """What a run leaves behind: metrics, receipts, maybe a checkpoint."""
    run.metrics.write_text('{"step": 1}\n')
    run.receipts(0).write_text("{}\n")
    run.receipts(3).write_text("{}\n")
    if step is not None:
        (run.checkpoints / f"step_{step:08d}").mkdir()


def test_a_new_directory_is_made_and_says_whose_it_is(tmp_path: Path) -> None:
    run = opened(tmp_path / "a" / "b")
    assert run.checkpoint is None
    assert (run.path / "config.yaml").read_text() == "a: 1\n"
    assert json.loads((run.path / "run.json").read_text())["digest"] == digest_of(SETTINGS)
    assert run.checkpoints.is_dir()


def test_a_run_without_a_checkpoint_is_moved_aside_and_nothing_is_lost(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("not of a run")
    leave(opened(tmp_path))
    leave(opened(tmp_path, OTHER))  # the guide's habit: another case into the same ./output
    third = opened(tmp_path)
    assert third.checkpoint is None
    assert not third.metrics.exists()
    assert not third.receipts(3).exists()
    for number, settings in ((1, SETTINGS), (2, OTHER)):
        aside = tmp_path / "earlier" / str(number)
        assert (aside / "metrics.jsonl").read_text() == '{"step": 1}\n'
        assert (aside / "receipts.3.jsonl").exists()
        assert json.loads((aside / "run.json").read_text())["digest"] == digest_of(settings)
    assert str(tmp_path / "earlier" / "2") in third.reason
    assert (tmp_path / "mine.txt").read_text() == "not of a run"


def test_the_same_run_continues_from_its_checkpoint(tmp_path: Path) -> None:
    leave(opened(tmp_path), 100)
    again = opened(tmp_path, SETTINGS | {"output_dir": str(tmp_path)})
    assert again.checkpoint == tmp_path / "checkpoints" / "step_00000100"
    assert again.metrics.exists()
    assert "--fresh" in again.reason


def test_another_run_with_a_checkpoint_is_an_error_that_says_the_three_ways_out(tmp_path: Path) -> None:
    leave(opened(tmp_path), 100)
    with pytest.raises(RunDirectoryError) as caught:
        opened(tmp_path, OTHER)
    for words in ("other settings", "step_00000100", "--resume auto", "--fresh", "--set output_dir="):
        assert words in str(caught.value)
    assert (tmp_path / "metrics.jsonl").exists()
    assert json.loads((tmp_path / "run.json").read_text())["digest"] == digest_of(SETTINGS)


def test_resume_auto_continues_with_other_settings_and_starts_where_nothing_is(tmp_path: Path) -> None:
    assert opened(tmp_path, resume="auto").checkpoint is None
    leave(opened(tmp_path, resume="auto"), 100)
    assert opened(tmp_path, OTHER, resume="auto").checkpoint == tmp_path / "checkpoints" / "step_00000100"


def test_fresh_moves_a_run_with_checkpoints_aside(tmp_path: Path) -> None:
    leave(opened(tmp_path), 100)
    run = opened(tmp_path, OTHER, fresh=True)
    assert run.checkpoint is None
    assert (tmp_path / "earlier" / "1" / "checkpoints" / "step_00000100").is_dir()
    assert list(run.checkpoints.iterdir()) == []


def test_a_checkpoint_given_by_its_path_is_where_the_run_continues(tmp_path: Path) -> None:
    leave(opened(tmp_path / "first"), 100)
    leave(RunDirectory(path=tmp_path / "first", checkpoint=None, reason=""), 200)
    older = tmp_path / "first" / "checkpoints" / "step_00000100"
    assert opened(tmp_path / "first", resume=str(older)).checkpoint == older
    assert opened(tmp_path / "second", OTHER, resume=str(older)).checkpoint == older
    with pytest.raises(RunDirectoryError, match="there is no such directory"):
        opened(tmp_path / "third", resume=str(tmp_path / "step_7"))


def test_a_restart_is_the_same_run_whatever_it_was_started_with(tmp_path: Path) -> None:
    leave(opened(tmp_path / "run", fresh=True))
    again = opened(tmp_path / "run", fresh=True, restarted=True)
    assert again.checkpoint is None
    assert again.metrics.exists()  # nothing was moved
    leave(again, 5)
    assert opened(tmp_path / "run", fresh=True, restarted=True).checkpoint == again.checkpoints / "step_00000005"
    # Started from another run's checkpoint: its own newer one counts, else that one again.
    given = str(again.checkpoints / "step_00000005")
    assert opened(tmp_path / "other", resume=given, restarted=True).checkpoint == Path(given)


def test_a_second_process_cannot_write_into_a_run_that_is_alive(tmp_path: Path) -> None:
    opened(tmp_path)
    program = (
        "import sys, pathlib; from lowtide.train.run_directory import open_run_directory\n"
        "open_run_directory(pathlib.Path(sys.argv[1]), settings={}, config='', checkpoint=None)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    second = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert second.returncode == 1
    assert f"is being written by another run, process {os.getpid()} on" in second.stderr
    free = subprocess.run([*command[:3], str(tmp_path / "b")], check=False, env=environment)
    assert free.returncode == 0
    opened(tmp_path / "b")  # a dead process holds nothing


TEXT = """\
# what it is
model:
  model_config:
    num_layers: 4  # small
parallel: &degrees {gradients_mean: True}
parallel_config: {data_parallel: 1}
"""


def read(text: str, overrides: dict[tuple[str | int, ...], Any]) -> dict[str, Any]:
    value: dict[str, Any] = check_text(text, None, overrides).document.value
    return value


def test_the_kept_file_has_the_changes_and_the_comments() -> None:
    changes: dict[tuple[str | int, ...], Any] = {
        ("model", "model_config", "num_layers"): 8,
        ("runner_config", "batch_size"): 2,
    }
    settings = read(TEXT, changes)
    kept = config_text(TEXT, changes, settings)
    assert "# what it is" in kept
    assert "num_layers: 8  # small" in kept
    assert read(kept, {}) == settings
    assert config_text(TEXT, {}, read(TEXT, {})) == TEXT


def test_a_change_inside_an_anchor_does_not_reach_its_other_uses() -> None:
    text = "train_dataset: &data\n  seed: 1  # one\ntrain_dataset_task:\n  dataset_config: *data\n"
    changes: dict[tuple[str | int, ...], Any] = {("train_dataset", "seed"): 2}
    settings = read(text, changes)
    assert settings["train_dataset_task"]["dataset_config"]["seed"] == 1
    assert read(config_text(text, changes, settings), {}) == settings

"""What the command line makes of its arguments; running it is in tests/train and tests/guides."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from lowtide.adaptive.settings import AdaptSettings
from lowtide.cli.main import app
from lowtide.cli.train import Tracker, _arguments, _launch, _options, _read
from lowtide.train.options import TrainOptions
from lowtide.train.run import _adapt

ROOT = Path(__file__).parents[2]
FILE = "model:\n  model_config:\n    num_layers: 4\nrecompute_config:\n  recompute: True\n"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RANK", "WORLD_SIZE", "LOWTIDE_LAUNCHER"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "run.yaml"
    path.write_text(FILE)
    return path


def run(*arguments: object, env: dict[str, str] | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["train", *map(str, arguments)], env={"COLUMNS": "200"} | (env or {}))
    return result.exit_code, result.output


def parsed(*arguments: str) -> dict[str, Any]:
    command = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
    params: dict[str, Any] = command.make_context("train", list(arguments)).params
    return params


def test_a_rank_gets_exactly_the_options_of_the_command(file: Path) -> None:
    texts = ["context.memory_optimize_level='O0'", "model.model_config.offset=[1, 0]", "seed=7"]
    values, check = _read(file, texts, "finetune", "True", 4)
    options = _options(
        check,
        resume="auto",
        fresh=False,
        dry_run=True,
        log_dir=Path("output/msrun"),
        watchdog=10.0,
        timeout=30.0,
        track=[Tracker.wandb, Tracker.tensorboard],
        device="h100",
        stop_signal="SIGUSR2",
        as_json=True,
    )
    assert options.run_directory == Path("output")
    assert values["runner_config", "gradient_accumulation_steps"] == 4
    rank = parsed(*_arguments(file, values, options)[1:])
    again, check = _read(rank["file"], rank["overrides"], rank["run_mode"], rank["use_parallel"], rank["accumulation"])
    assert again == values
    assert [type(value) for value in again.values()] == [type(value) for value in values.values()]
    keys = ("resume", "fresh", "dry_run", "log_dir", "watchdog", "timeout", "track", "device", "stop_signal", "as_json")
    assert _options(check, **{key: rank[key] for key in keys}) == options
    assert rank["processes"] is None  # a rank starts no processes


def test_logs_are_in_the_run_directory_unless_said_otherwise(file: Path) -> None:
    nothing: dict[str, Any] = dict.fromkeys(("resume", "log_dir", "watchdog", "track", "device"))
    plain = {"fresh": False, "dry_run": False, "timeout": 1800.0, "stop_signal": "USR1", "as_json": False}
    _, check = _read(file, ["output_dir=somewhere"], None, None, None)
    assert _options(check, **(nothing | plain)).log_dir == Path("somewhere/logs")


def test_a_process_that_torchrun_started_is_a_rank(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {"nodes": 1, "node_rank": 0}
    assert _launch(None, asked, parallel=None) is None
    settings = _launch("3", asked, parallel=True)
    assert settings is not None
    assert settings.processes == 3
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert _launch("3", asked, parallel=True) is None


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "which file?"),
        (["FILE", "--config", "FILE"], 2, "given twice"),
        (["FILE", "--nproc", "two"], 2, "expected a number from 1, or auto"),
        (["FILE", "--use_parallel", "maybe"], 2, "expected True or False"),
        (["FILE", "--use_parallel", "False", "--nproc", "2"], 1, "give one of them"),
        (["FILE", "--resume", "auto", "--fresh"], 2, "give one of them"),
        (["FILE", "--nnodes", "2", "--nproc", "1"], 1, "--master-addr"),
        (["FILE", "--nproc", "2", "--set", "parallel_config.pipeline_stage=3"], 1, "3"),
        (["FILE", "--run_mode", "predict"], 1, "lowtide trains; it does not predict"),
        (["FILE", "--set", "recompute_config.recompte=1"], 1, "recompute"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(file: Path, arguments: list[str], code: int, words: str) -> None:
    found, output = run(*(str(file) if one == "FILE" else one for one in arguments))
    assert found == code
    assert words in output


def test_accumulation_on_the_command_line_is_refused_for_a_file_of_the_2026_layout(file: Path) -> None:
    file.write_text("training: {steps: 4, local_batch_size: 1}\nmodel: {num_layers: 4}\n")
    code, output = run(file, "--gradient_accumulation_steps", 4)
    assert code == 2
    assert "training.global_batch_size=N" in output


SIZE, STEP, SWAP = (f"--adaptive-recompute-{name}" for name in ("device-size", "profiling-step", "device-swap"))


def adapted(file: Path, *flags: str) -> AdaptSettings | None:
    """What a run with these flags does, as each of its ranks would read it."""
    given = parsed(str(file), *flags)
    adaptive = {name: given[name] for name in ("device_size", "profiling_step")}
    values, check = _read(file, [], None, None, None, adaptive | {"device_swap": given["device_swap"] or None})
    options = TrainOptions(run_directory=Path("output"), log_dir=Path("logs"))
    rank = parsed(*_arguments(file, values, options)[1:])
    again, _ = _read(rank["file"], rank["overrides"], None, None, None)
    assert again == values
    settings = check.settings
    assert settings is not None
    return _adapt(settings, None).settings


def test_the_guides_flags_ask_for_the_adaptive_mode(file: Path) -> None:
    assert adapted(file) is None
    assert adapted(file, STEP, "20") is None
    assert adapted(file, SWAP, STEP, "20") == AdaptSettings(profiling_steps=20)
    assert adapted(file, SIZE, "61440") == AdaptSettings(budget=60 * 2**30, rescue=False)
    assert adapted(file, SIZE, "-1", SWAP) == AdaptSettings()


@pytest.mark.parametrize("name", ["device_size", "adaptive_recompute_device_size", "adaptive-recompute-device-size"])
def test_a_flag_wins_over_the_file_in_whichever_spelling(file: Path, name: str) -> None:
    file.write_text(f"{FILE}adapt:\n  {name}: 100\n  profiling_step: 7\n  verbosity: quiet\n")
    expected = AdaptSettings(budget=200 * 2**20, rescue=False, profiling_steps=7, verbose=False)
    assert adapted(file, SIZE, "200") == expected


def test_a_device_size_on_the_command_line_wins_over_a_budget_in_the_file(file: Path) -> None:
    file.write_text(f"{FILE}adapt:\n  budget: 60GiB\n")
    assert adapted(file) == AdaptSettings(budget=60 * 2**30)
    assert adapted(file, SIZE, "200") == AdaptSettings(budget=200 * 2**20, rescue=False)


def test_what_the_run_may_use_of_the_device_bounds_the_plan(file: Path) -> None:
    file.write_text(f"{FILE}context:\n  max_device_memory: 1GiB\n")
    assert adapted(file, SWAP) == AdaptSettings(budget=2**30)
    assert adapted(file, SIZE, "512") == AdaptSettings(budget=2**29, rescue=False)
    assert adapted(file, SIZE, "4096") == AdaptSettings(budget=2**30, rescue=False)


def test_legacy_models_are_accepted_and_said_to_have_no_effect(file: Path) -> None:
    _, output = run(file, "--use-legacy-models", "--dry-run", "--set", "model.model_config.seq_length=32")
    assert "--use-legacy-models has no effect" in output


def test_a_wrong_log_level_is_said_before_anything_starts(file: Path) -> None:
    code, output = run(file, env={"GLOG_v": "7"})
    assert code == 1
    assert "GLOG_v is '7'" in output


def test_errors_of_the_file_are_said_once_not_once_a_rank(file: Path) -> None:
    broken = ("--set", "recompute_config.recompute=[1, 2, 3]")
    assert "recompute" in run(file, *broken, env={"RANK": "0", "WORLD_SIZE": "2"})[1]
    assert run(file, *broken, env={"RANK": "1", "WORLD_SIZE": "2"}) == (1, "")


def test_help_reads_without_torch() -> None:
    program = (
        "import sys\nfrom lowtide.cli.main import app\n"
        "try:\n    app(['train', '--help'])\nexcept SystemExit:\n    pass\n"
        "sys.stderr.write(str('torch' in sys.modules))"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stderr == "False"
    for words in ("--nproc", "--max-restarts", "Several nodes", "As in MindSpore Transformers", "Example:"):
        assert words in shown.stdout

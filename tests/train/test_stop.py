"""A run that is asked to stop saves at the end of its step and ends; the same command continues bit by bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import LaunchError
from lowtide.train.commit import checkpoints_in
from lowtide.train.launch import Launch, launch
from lowtide.train.stop import STOPPED, stop_signals
from support.commands import TINY, merged

STEPS = 60
RUN = merged(
    TINY,
    {
        "model": {"model_config": {"hidden_dropout": 0.1}},
        "runner_config": {"stop_step": STEPS, "epochs": 100},
        "runner_wrapper": {"use_clip_grad": True, "max_grad_norm": 1.0},
    },
)
PATIENCE = 400  # seconds; the machine is shared
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start ``lowtide train`` in a directory of the test's."""
    running: list[subprocess.Popen[str]] = []

    def started(name: str, *flags: str, run: dict[str, Any] = RUN) -> subprocess.Popen[str]:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "run.yaml").write_text(json.dumps(run))
        command = [sys.executable, "-m", "lowtide", "train", "run.yaml", "--json", *flags]
        process = subprocess.Popen(
            command, cwd=tmp_path / name, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        running.append(process)
        return process

    yield started
    for process in running:
        process.kill()
        process.communicate()


def wait_for_steps(process: subprocess.Popen[str], directory: Path, steps: int) -> None:
    end = time.monotonic() + PATIENCE
    while len(metrics(directory)) < steps:
        assert time.monotonic() < end, "no step in time"
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def metrics(directory: Path) -> list[tuple[int, float, float]]:
    file = directory / "output" / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    steps = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(step["step"], step["loss"], step["global_norm"]) for step in steps]


def saved_steps(directory: Path) -> list[int]:
    return [marker.step for _, marker in checkpoints_in(directory / "output" / "checkpoints")]


# The job is started three times. Two ranks that stop together are also in ``benchmarks/crash.py``, which is a test.
@pytest.mark.parametrize("ranks", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_ranks_save_on_a_signal_to_their_launcher_and_continue_bit_by_bit(
    tmp_path: Path, start: Start, ranks: str
) -> None:
    undisturbed = start("undisturbed", "--nproc", ranks)
    assert undisturbed.wait(PATIENCE) == 0, undisturbed.communicate()
    run = start("run", "--nproc", ranks, "--max-restarts", "1")
    wait_for_steps(run, tmp_path / "run", 3)
    run.send_signal(signal.SIGTERM)
    out, err = run.communicate(timeout=PATIENCE)
    assert run.returncode == STOPPED, err  # and no rank was started again
    stopped = json.loads(out)["stopped_after"]
    assert saved_steps(tmp_path / "run") == [stopped]
    assert [step for step, *_ in metrics(tmp_path / "run")] == list(range(1, stopped + 1))
    said = f"stopped after step {stopped} of {STEPS} by SIGTERM: saved output/checkpoints/step_{stopped:08d}; the same"
    assert err.count(said) == 1
    assert "error" not in err
    again = start("run", "--nproc", ranks)
    out, err = again.communicate(timeout=PATIENCE)
    assert again.returncode == 0, err
    assert json.loads(out)["resumed_from"] == stopped
    assert metrics(tmp_path / "run") == metrics(tmp_path / "undisturbed")


@pytest.mark.slow
def test_a_scheduler_may_signal_one_rank_with_a_signal_of_its_own(tmp_path: Path, start: Start) -> None:
    """All ranks know of it after the step, those without a signal too."""
    run = start("run", "--nproc", "2", "--stop-signal", "SIGUSR2")
    wait_for_steps(run, tmp_path / "run", 2)
    first = int((tmp_path / "run" / "output" / "run.lock").read_text().split()[1])
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    (second,) = (
        pid for pid in map(int, children) if pid != first and b"train" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(second, signal.SIGUSR2)
    out, err = run.communicate(timeout=PATIENCE)
    assert run.returncode == STOPPED, err
    assert saved_steps(tmp_path / "run") == [json.loads(out)["stopped_after"]]
    logs = tmp_path / "run" / "output" / "logs"
    assert "by a signal to another rank: saved" in (logs / "worker_0.log").read_text()
    assert "by SIGUSR2: saved" in (logs / "worker_1.log").read_text()


def test_a_rank_that_its_launcher_ends_does_not_save(tmp_path: Path, start: Start) -> None:
    """SIGTERM to a rank alone is a failure of that rank: its launcher was not asked to stop."""
    run = start("run", "--nproc", "1")
    wait_for_steps(run, tmp_path / "run", 2)
    os.kill(int((tmp_path / "run" / "output" / "run.lock").read_text().split()[1]), signal.SIGTERM)
    _, err = run.communicate(timeout=PATIENCE)
    assert run.returncode == 128 + signal.SIGTERM
    assert "rank 0 was ended by SIGTERM" in err
    assert saved_steps(tmp_path / "run") == []


@pytest.mark.slow
def test_a_second_sigterm_ends_the_run_and_leaves_the_checkpoint_before(tmp_path: Path, start: Start) -> None:
    steps = 4000  # each is short: the run must not be finished before the signals come
    slow = merged(
        RUN,
        {
            "model": {"model_config": {"vocab_size": 20_000, "hidden_size": 256, "intermediate_size": 512}},
            "runner_config": {"stop_step": steps},
            "callbacks": [{"type": "CheckpointMonitor", "save_checkpoint_steps": 3}],
        },
    )
    run = start("run", run=slow)
    wait_for_steps(run, tmp_path / "run", 4)
    checkpoints = tmp_path / "run" / "output" / "checkpoints"
    before = set(checkpoints.iterdir())
    run.send_signal(signal.SIGTERM)
    end = time.monotonic() + PATIENCE
    while set(checkpoints.iterdir()) <= before and time.monotonic() < end:
        time.sleep(0.001)
    run.send_signal(signal.SIGTERM)  # while it saves
    _, err = run.communicate(timeout=PATIENCE)
    assert run.returncode in (-signal.SIGTERM, STOPPED), err  # the save may have been faster
    committed = saved_steps(tmp_path / "run")
    assert committed
    slow["runner_config"]["stop_step"] = committed[0] + 1
    again = start("run", "--resume", "auto", run=slow)
    out, err = again.communicate(timeout=PATIENCE)
    assert again.returncode == 0, err
    assert json.loads(out)["resumed_from"] == committed[0]


def test_a_launcher_that_gets_sigterm_twice_ends_its_ranks(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from lowtide.train.launch import Launch, launch\n"
        "from lowtide.train.stop import stop_signals\n"
        f"settings = Launch(processes=2, log_dir=Path({str(tmp_path)!r}), stop_signals=stop_signals('none'))\n"
        f"sys.exit(launch('support.stand_in_rank', [{str(tmp_path)!r}, 'wait'], settings))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    launcher = subprocess.Popen([sys.executable, "-c", program], env=environment, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + PATIENCE
        while not all((tmp_path / f"waiting_{rank}").exists() for rank in (0, 1)):
            assert time.monotonic() < end
            time.sleep(0.05)
        launcher.send_signal(signal.SIGTERM)
        time.sleep(1)
        assert launcher.poll() is None  # these ranks wait on: they never come to the end of a step
        launcher.send_signal(signal.SIGTERM)
        _, err = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
    assert launcher.returncode == 128 + signal.SIGTERM
    assert "ended by SIGTERM" in err


def test_a_launcher_restores_the_handlers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    before = signal.getsignal(signal.SIGUSR1)
    settings = Launch(processes=1, log_dir=tmp_path, stop_signals=stop_signals("USR1"))
    assert launch("support.stand_in_rank", [str(tmp_path), "sum"], settings) == 0
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_signal_that_no_run_can_stop_on_is_refused() -> None:
    assert stop_signals("usr2") == (signal.SIGTERM, signal.SIGUSR2)
    assert stop_signals("none") == (signal.SIGTERM,)
    with pytest.raises(LaunchError, match="expected one of USR1"):
        stop_signals("KILL")

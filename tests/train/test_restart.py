"""The whole command: a rank is killed, all are started again, and the run goes on as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE = 400  # seconds; the machine is shared
CALLBACKS = (
    "callbacks=[{type: MFLossMonitor, per_print_times: 10}, {type: CheckpointMonitor, save_checkpoint_steps: 5}]"
)


# Each rank starts twice. That a launcher ends and starts again the others of one that failed is tested with two.
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_rank_costs_no_step_and_no_checkpoint(tmp_path: Path, ranks: int) -> None:
    example = ROOT / "examples" / "yaml" / "train_swap_default.yaml"
    command = [sys.executable, "-m", "lowtide", "train", str(example), "--nproc", str(ranks)]
    command += ["--max-restarts", "1", "--json"]
    command += ["--set", CALLBACKS, "--set", "runner_config.stop_step=40"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    metrics, lock = tmp_path / "output" / "metrics.jsonl", tmp_path / "output" / "run.lock"
    run = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        end = time.monotonic() + PATIENCE
        while not (metrics.exists() and metrics.read_text().count("\n") >= 8):
            assert time.monotonic() < end, "no step in time"
            assert run.poll() is None, run.communicate()
            time.sleep(0.02)
        first = int(lock.read_text().split()[1])  # rank 0 holds the directory
        os.kill(first, signal.SIGKILL)
        out, err = run.communicate(timeout=PATIENCE)
    finally:
        run.kill()
    assert run.returncode == 0, err[-3000:]
    result = json.loads(out)
    assert result["resumed_from"] % 5 == 0
    assert result["resumed_from"] >= 5
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, 41))
    assert int(lock.read_text().split()[1]) != first
    log = (tmp_path / "output" / "logs" / "worker_0.log").read_text()
    assert "was started again after a failure: continues from" in log

"""Real processes on this machine: they meet, fail, are started again, and end with their launcher."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lowtide.errors import LaunchError
from lowtide.train.launch import Launch, launch

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from pathlib import Path
from lowtide.train.launch import Launch, launch

logs, deed, nodes, node, port = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:6])
address = "127.0.0.1" if nodes > 1 else None
settings = Launch(processes=2 if nodes == 1 else 1, nodes=nodes, node_rank=node, master_address=address,
                  master_port=port or None, max_restarts=int(deed == "fail_once"), log_dir=logs, timeout=60)
sys.exit(launch("support.stand_in_rank", [str(logs), deed], settings))
"""


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]))


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def start(logs: Path, deed: str, nodes: int = 1, node: int = 0, port: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(logs), deed, str(nodes), str(node), str(port)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def eventually(condition: object, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_ranks_meet_and_each_has_its_own_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = dict(os.environ)
    assert launch("support.stand_in_rank", [str(tmp_path), "sum"], Launch(processes=2, log_dir=tmp_path)) == 0
    assert dict(os.environ) == before
    for rank in (0, 1):
        text = (tmp_path / f"worker_{rank}.log").read_text()
        assert f"[rank {rank}]" in text
        assert "-INFO - sum 3 of 2 ranks" in text
        assert "run directory run\n" in text  # opened by rank 0 alone, known to both
        assert "every rank knows: refused by rank 0" in text
    # Rank 0's lines are on the terminal too, the others' are not; what a rank prints itself likewise.
    shown = capfd.readouterr()
    assert shown.err.count("sum 3 of 2 ranks") == 1
    assert shown.out == "printed by 0\n"
    assert "printed by 1" in (tmp_path / "worker_1.log").read_text()


def test_a_failed_rank_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    said: list[str] = []
    settings = Launch(processes=2, log_dir=tmp_path)
    assert launch("support.stand_in_rank", [str(tmp_path), "fail"], settings, said.append) == 1
    assert said[0].startswith("error: rank 1 ended with exit code 1")
    assert str(tmp_path / "worker_1.log") in said[0]
    assert re.search(r"worker_1.log ends with\n  (\[rank1\]: )?Traceback", said[0])  # and not with what went before
    assert said[0].endswith("RuntimeError: this rank was made to fail")


def test_a_rank_that_is_killed_is_named_and_not_one_that_lost_it(tmp_path: Path) -> None:
    said: list[str] = []
    settings = Launch(processes=2, log_dir=tmp_path)
    assert launch("support.stand_in_rank", [str(tmp_path), "die"], settings, said.append) == 137
    assert said[0].startswith("error: rank 1 was ended by SIGKILL")


@pytest.mark.slow
def test_a_restart_goes_on_in_the_same_log(tmp_path: Path) -> None:
    settings = Launch(processes=2, log_dir=tmp_path, max_restarts=1)
    assert launch("support.stand_in_rank", [str(tmp_path), "fail_once"], settings) == 0
    text = (tmp_path / "worker_1.log").read_text()
    assert len(set(re.findall(r"process (\d+)", text))) == 2
    assert "made to fail" in text
    assert not (tmp_path / "worker_1.1.log").exists()


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, id="Ctrl-C", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, -9, id="kill"),
    ],
)
def test_no_rank_outlives_its_launcher(
    tmp_path: Path, started: list[subprocess.Popen[str]], number: signal.Signals, code: int
) -> None:
    launcher = start(tmp_path, "wait")
    started.append(launcher)
    marks = [tmp_path / "waiting_0", tmp_path / "waiting_1"]
    eventually(lambda: all(mark.exists() and mark.read_text() for mark in marks))
    ranks = [int(mark.read_text()) for mark in marks]
    assert all(map(alive, ranks))
    launcher.send_signal(number)
    assert launcher.wait(60) == code
    eventually(lambda: not any(map(alive, ranks)), 20)


def test_two_nodes_meet_at_the_first_and_keep_their_ranks(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started += [start(tmp_path / f"node_{node}", "fail_once", 2, node, port) for node in (1, 0)]
    outputs = [process.communicate(timeout=100) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    assert "sum 3 of 2 ranks" in (tmp_path / "node_0" / "worker_0.log").read_text()
    assert "made to fail" in (tmp_path / "node_1" / "worker_1.log").read_text()  # and both were started again


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"processes": 0}, "at least 1"),
        ({"processes": 1, "nodes": 2, "node_rank": 2}, "the last is 1"),
        ({"processes": 1, "nodes": 2}, "--master-addr"),
    ],
)
def test_settings_that_cannot_work_say_what_is_missing(settings: dict[str, int], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        Launch(**settings)

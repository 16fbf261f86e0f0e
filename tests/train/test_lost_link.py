"""Two nodes, as two network namespaces of this machine, whose link is cut while they train."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT = 24.0
FIRST = "10.77.0.1"
PORT = 29555


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """Names of two namespaces with one link, whose ends are `link0` and `link1`."""
    names = [f"lowtide{os.getpid()}{end}" for end in "ab"]
    if shutil.which("ip") is None:
        pytest.skip("needs the ip command")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "link0", "netns", names[0], "type", "veth", "peer", "name", "link1", "netns", names[1])
        for number, name in enumerate(names):
            ip("-n", name, "address", "add", f"10.77.0.{number + 1}/24", "dev", f"link{number}")
            for link in ("lo", f"link{number}"):
                ip("-n", name, "link", "set", link, "up")
        yield names
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def start(namespace: str, node: int, directory: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lowtide", "train", str(ROOT / "examples/yaml/train_swap_default.yaml")]
    command += ["--nproc", "1", "--nnodes", "2", "--node-rank", str(node), "--timeout", str(TIMEOUT)]
    command += ["--master-addr", FIRST, "--master-port", str(PORT), "--log-dir", str(directory / "logs")]
    command += ["--set", f"output_dir={directory / 'run'}"]
    for setting in ("runner_config.epochs", "runner_config.stop_step", "lr_schedule.total_steps"):
        command += ["--set", f"{setting}=1000000"]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"GLOO_SOCKET_IFNAME": f"link{node}", "PYTHONPATH": path}
    return subprocess.Popen(
        ["ip", "netns", "exec", namespace, *command],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


# It waits for half a minute. That two nodes meet, that a hang is reported and ended, are tests of their own.
@pytest.mark.slow
def test_both_nodes_end_with_a_clear_error_within_the_timeout(nodes: list[str], tmp_path: Path) -> None:
    processes = [start(name, node, tmp_path) for node, name in enumerate(nodes)]
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        end = time.monotonic() + 120
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
            assert time.monotonic() < end, [process.communicate(timeout=1) for process in processes]
            time.sleep(0.1)
        ip("-n", nodes[1], "link", "set", "link1", "down")
        cut = time.monotonic()
        errors = [process.communicate(timeout=3 * TIMEOUT)[1] for process in processes]
        seconds = time.monotonic() - cut
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [75, 1], errors
    assert seconds < TIMEOUT + 10  # the system ends processes in its own time
    assert "watchdog: 2 ranks hang:" in errors[0]
    assert "no rank is missing: look at the network between them" in errors[0]
    assert f"error: node 1 of 2 lost the first node, {FIRST}: its launcher does not answer" in errors[1]
    assert "start the job again to continue from the newest checkpoint" in errors[1]
    for error in errors:
        assert "frame #" not in error  # of torch's C++

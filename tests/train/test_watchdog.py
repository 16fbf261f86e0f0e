"""A hang is noticed, reported by rank, and ended if asked; a rank that makes progress is left alone."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowtide.errors import ConfigError
from lowtide.train.options import TrainOptions
from lowtide.train.watchdog import ENDED, Place, Watchdog, reported_after, summary_of


def test_a_hanging_job_says_where_each_rank_is_stuck_and_ends(tmp_path: Path) -> None:
    script = Path(__file__).parent / "hanging_rank.py"
    logs = [(tmp_path / f"log_{rank}").open("w+") for rank in range(2)]
    processes = [
        subprocess.Popen([sys.executable, str(script), str(tmp_path), str(rank)], stdout=log, stderr=log)
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    said = [(tmp_path / f"log_{rank}").read_text() for rank in range(2)]
    assert codes == [ENDED, ENDED], said
    assert re.search(r"rank 0 has not moved for \d+ s: forward of step 3, micro-batch 1", said[0])
    assert re.search(r"rank 1 has not moved for \d+ s: data of step 3, micro-batch 0", said[1])
    assert "all_reduce" in said[0]  # the stacks
    assert "in stuck_in_data" in said[1]
    assert "2 ranks hang:" in said[0]
    assert "1 rank (1): data of step 3, micro-batch 0" in said[0]
    assert "1 rank (0): forward of step 3, micro-batch 1" in said[0]
    assert "ranks hang" not in said[1]


def test_a_watchdog_slower_than_collectives_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--watchdog 1800 and --timeout 900: .*takes 1870 s"):
        TrainOptions(run_directory=tmp_path, log_dir=tmp_path, watchdog=1800.0, timeout=900.0)
    assert TrainOptions(run_directory=tmp_path, log_dir=tmp_path, watchdog=0.0, timeout=1.0).watchdog_seconds == 0


@pytest.mark.parametrize("timeout", [1.0, 60.0, 300.0, 1800.0, 36_000.0])
def test_unless_given_the_watchdog_has_reported_before_collectives_fail(tmp_path: Path, timeout: float) -> None:
    options = TrainOptions(run_directory=tmp_path, log_dir=tmp_path, timeout=timeout)
    assert 0 < options.watchdog_seconds < reported_after(options.watchdog_seconds) < timeout


def test_a_place_may_have_more_patience_than_the_others(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+") as log:
        watchdog = Watchdog(tmp_path / "watchdog", rank=0, world_size=1, timeout=0.2, stream=log)
        watchdog.at("checkpoint", 1, patience=30.0)
        time.sleep(1.0)
        patient = (tmp_path / "log").read_text()
        watchdog.at("forward", 2)
        time.sleep(1.0)
        watchdog.close()
        assert patient == ""
        assert "forward of step 2" in (tmp_path / "log").read_text()


def test_a_process_that_holds_the_interpreter_lock_is_reported_and_ended_too(tmp_path: Path) -> None:
    program = (
        "import ctypes, pathlib, time\n"
        "from lowtide.train.watchdog import Watchdog\n"
        f"watchdog = Watchdog(pathlib.Path({str(tmp_path)!r}), rank=0, world_size=1, timeout=1.0, end=True)\n"
        "watchdog.at('forward', 1)\n"
        "time.sleep(0.5)\n"
        "ctypes.PyDLL(None).sleep(600)\n"  # without giving up the lock
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "Timeout (0:00:02)!" in ended.stderr
    assert 'File "<string>", line 6' in ended.stderr


def test_a_rank_that_moves_or_rests_is_left_alone(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+") as log:
        watchdog = Watchdog(tmp_path / "watchdog", rank=0, world_size=1, timeout=0.4, stream=log)
        for _ in range(20):
            watchdog.at("forward", 1)  # the same place again is progress too
            time.sleep(0.05)
        watchdog.rest()
        time.sleep(0.8)
        watchdog.close()
        assert (tmp_path / "log").read_text() == ""


def test_after_a_hang_that_ends_by_itself_the_next_one_is_reported_too(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+") as log:
        watchdog = Watchdog(tmp_path / "watchdog", rank=0, world_size=1, timeout=0.2, stream=log)
        for step in (1, 2):
            watchdog.at("forward", step)
            time.sleep(0.8)
        watchdog.close()
        said = (tmp_path / "log").read_text()
    assert said.count("rank 0 has not moved") == 2
    assert "1 rank (0): forward of step 2" in said


def test_a_summary_stays_short_for_thousands_of_ranks() -> None:
    places = {rank: Place("forward", 7, 0) for rank in range(4096)}
    places[5] = Place("data", 7, 0)
    places |= {rank: Place("backward", 6, 3) for rank in range(100, 4000, 100)}
    del places[9]
    summary = summary_of(places, 4096).splitlines()
    assert summary[:4] == [
        "4095 ranks hang:",
        "  1 rank (5): data of step 7, micro-batch 0",
        "  1 rank (9): no word: ended, or not hanging",
        "  39 ranks (100, 200, 300, 400, 500, 600, 700, 800 and 31 more ranges): backward of step 6, micro-batch 3",
    ]
    assert len(summary) == 5
    assert all(len(line) < 140 for line in summary)


def test_noting_a_place_costs_next_to_nothing(tmp_path: Path) -> None:
    watchdog = Watchdog(tmp_path, rank=0, world_size=1)
    begin = time.thread_time()
    for step in range(100_000):
        watchdog.at("forward", step)
    seconds = (time.thread_time() - begin) / 100_000
    watchdog.close()
    assert seconds < 5e-6

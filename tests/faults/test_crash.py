"""A training job that is killed and resumed is the one that nobody disturbed. ``benchmarks/crash.py`` kills more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "crash.py"


# Each kill is a job of two processes more. What eight of them try, kills in a save, of one rank, and stops, twenty try
# more often.
@pytest.mark.parametrize("kills", [8, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_job_resumes_bit_by_bit_and_loses_nothing(kills: int) -> None:
    command = [sys.executable, str(BENCHMARK), "--json", "--kills", str(kills)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout.splitlines()[-1])
    assert figures["kills"] == kills
    for name in ("lost_committed", "unloadable", "resume_not_bitwise", "samples_duplicated_or_skipped"):
        assert figures[name] == 0, ended.stderr

"""The fixture that makes a race fail a test."""

import os
import subprocess
import sys

CONFTEST = 'pytest_plugins = ["tide.testing"]\n'
TESTS = """
import torch

def test_racy():
    x = torch.zeros(8, device="tide")
    with torch.Stream("tide"):
        x.add_(1)

def test_racy_and_expecting_it(expect_races):
    test_racy()
    assert expect_races()

def test_fine():
    assert torch.accelerator.memory_allocated() == 0
    torch.zeros(8, device="tide").add_(1)
"""


def test_a_race_fails_the_test_it_happens_in_and_no_other(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_them.py").write_text(TESTS)
    result = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert "3 passed, 1 error" in result.stdout, result.stdout
    assert "ERROR test_them.py::test_racy -" in result.stdout
    assert "RaceError" in result.stdout and "read after write" in result.stdout

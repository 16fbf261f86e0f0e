"""The examples run, and say what they say they do."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
EXPECTED = {
    "race.py": "1 race",
    "capacity.py": "layers fit into 64 MiB",
    "overlap.py": "overlapped",
}


def test_every_example_is_run() -> None:
    assert {file.name for file in EXAMPLES.glob("*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_runs(name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert EXPECTED[name] in done.stdout

"""scripts/words finds the words that the style guide replaces."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "words"


def words(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("the copy runs beside the computation", "beside"),
        ("def _learnt(self) -> None:", "learnt"),
        ("Whoever calls this", "whoever"),
        ("its memory is let go", "let go"),
        ("self.lets_go = []", "lets_go"),
        ("the model is as it was", "as it was"),
        ("share_data(model)", "share_data"),
    ],
)
def test_a_planted_word_is_found_with_its_file_and_line(tmp_path: Path, line: str, word: str) -> None:
    file = tmp_path / "planted.py"
    file.write_text(f"# fine\n{line}\n")
    found = words(str(file))
    assert found.returncode == 1
    assert f"planted.py:2: {word}: write " in found.stdout


@pytest.mark.parametrize(
    "line", ["besides", "the learning rate, learning_rates", "forget go", "understands", "as it was  # words: meant"]
)
def test_a_word_that_is_meant_is_not_found(tmp_path: Path, line: str) -> None:
    file = tmp_path / "fine.py"
    file.write_text(line)
    assert words(str(file)).returncode == 0


def test_the_sources_have_none_of_them() -> None:
    found = words()
    assert found.returncode == 0, found.stdout

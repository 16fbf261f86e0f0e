"""Each script in examples/ runs with the command in its docstring, and its loss falls."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples").glob("*/*.py"))
LAUNCHERS = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}
NEEDED = {
    "python": [],
    "transformers": ["transformers", "accelerate"],  # its Trainer needs the other
    "trl": ["trl", "transformers", "datasets"],
    "accelerate": ["accelerate", "transformers"],
    "deepspeed": ["deepspeed", "transformers"],
}
"""What a folder's scripts import; unless it is here, the package of that name."""

every_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda one: f"{one.parent.name}/{one.name}")


def command(script: Path) -> list[str]:
    """The command in the docstring of a script."""
    lines = (ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "").splitlines()
    (found,) = [line.strip() for line in lines if line.strip().split(" ")[0] in LAUNCHERS and line.startswith("    ")]
    return shlex.split(found)


@every_script
def test_a_script_runs_as_its_docstring_says(script: Path, tmp_path: Path) -> None:
    for package in NEEDED.get(script.parent.name, [script.parent.name]):
        if find_spec(package) is None:  # importing it here would take seconds, and it may change this process
            pytest.skip(f"{package} is not installed")
    launcher, *arguments = command(script)
    name = f"examples/{script.parent.name}/{script.name}"
    assert name in arguments
    assert "--tiny" in arguments
    ended = subprocess.run(
        [sys.executable, *LAUNCHERS[launcher], *(str(script) if one == name else one for one in arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    losses = [float(loss) for loss in re.findall(r"step \d+ loss (\S+)", ended.stdout)]
    assert len(losses) >= 2, ended.stdout
    assert losses[-1] < losses[0]


@every_script
def test_a_script_is_short(script: Path) -> None:
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 80


def test_the_table_has_the_command_of_each_script() -> None:
    table = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| \[`(.+?)`\].*`(\S.*?)` \|$", table, flags=re.MULTILINE))
    assert rows == {f"{one.parent.name}/{one.name}": shlex.join(command(one)) for one in SCRIPTS}

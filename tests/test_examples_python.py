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

from support.forked import Ended, run_script

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples").glob("*/*.py"))
LAUNCHERS = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}
"""Arguments of Python; what it runs by itself is forked from a process that has torch imported."""
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


def launched(arguments: list[str], folder: Path) -> Ended:
    command = [sys.executable, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=folder)
    return Ended(ended.returncode, ended.stdout, ended.stderr)


@every_script
def test_a_script_runs_as_its_docstring_says(script: Path, tmp_path: Path) -> None:
    for package in NEEDED.get(script.parent.name, [script.parent.name]):
        if find_spec(package) is None:  # importing it here would take seconds, and it may change this process
            pytest.skip(f"{package} is not installed")
    launcher, *arguments = command(script)
    name = f"examples/{script.parent.name}/{script.name}"
    assert name in arguments
    assert "--tiny" in arguments
    if launcher == "python":
        ended = run_script(script, arguments[1:], tmp_path)
    else:
        whole = [*LAUNCHERS[launcher], *(str(script) if one == name else one for one in arguments)]
        ended = launched(whole, tmp_path)
        if "terminate called without an active exception" in ended.error:
            ended = launched(whole, tmp_path)  # torch aborts now and then when a short program of several threads exits
    assert ended.code == 0, ended.error
    losses = [float(loss) for loss in re.findall(r"step \d+ loss (\S+)", ended.output)]
    assert len(losses) >= 2, ended.output
    assert losses[-1] < losses[0]


@every_script
def test_a_script_is_short(script: Path) -> None:
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 80


def test_the_table_has_the_command_of_each_script() -> None:
    table = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| \[`(.+?)`\].*`(\S.*?)` \|$", table, flags=re.MULTILINE))
    assert rows == {f"{one.parent.name}/{one.name}": shlex.join(command(one)) for one in SCRIPTS}

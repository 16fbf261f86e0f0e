"""What runs where the system has no locks of files and no resource module, as Windows has none."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer

from lowtide.cli.train import train

IMPORT_ALL = """
import importlib, pkgutil, sys
sys.modules["fcntl"] = sys.modules["resource"] = None
import lowtide
without = ("lowtide.__main__", "lowtide.integrations.torchtitan", "lowtide.integrations.axolotl")
names = [one.name for one in pkgutil.walk_packages(lowtide.__path__, "lowtide.")]
names = [name for name in names if name not in without]
for name in names:
    importlib.import_module(name)
print(len(names))
"""


def test_every_module_is_imported_without_what_only_unix_has() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 200


def test_train_says_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(typer.BadParameter, match="runs on Linux"):
        train()

"""Training scripts that know nothing of lowtide, started as a user starts them, on the virtual accelerator."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["LARGE", "SCRIPTS", "Ended", "on_tide", "same", "start"]

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks" / "scripts"
DEVICE = Path(__file__).resolve().parents[1] / "virtual_device"
LARGE = 1 << 30
"""A capacity that is enough for each of them."""


@dataclass
class Ended:
    """How a script ended."""

    code: int
    output: str
    error: str
    out: Path

    @property
    def results(self) -> Any:
        """What it saved; None if it did not come to that."""
        return torch.load(self.out, map_location="cpu", weights_only=False) if self.out.exists() else None

    @property
    def said(self) -> list[str]:
        """The lines of lowtide on standard error."""
        return [line for line in self.error.splitlines() if line.startswith("lowtide: ")]


def start(
    script: Path,
    *arguments: str,
    folder: Path,
    under: list[str] | None = None,
    capacity: int = LARGE,
    ranks: int = 0,
    device: bool = True,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Run a script alone, or under ``lowtide run`` with options; its first argument is where it saves its results."""
    out = folder / f"out-{'alone' if under is None else 'under'}-{capacity}.pt"
    out.unlink(missing_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    command = [sys.executable, *launcher, *([] if under is None else ["-m", "lowtide", "run", *under])]
    ended = subprocess.run(
        [*command, str(script), str(out), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (on_tide(capacity) if device else {}) | dict(environment or {}),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=folder,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr, out)


def on_tide(capacity: int) -> dict[str, str]:
    """The environment in which the virtual accelerator is a process's device; accelerate is told its name."""
    path = os.pathsep.join([str(DEVICE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"TIDE_CAPACITY": str(capacity), "ACCELERATE_TORCH_DEVICE": "tide", "PYTHONPATH": path}


def same(left: Any, right: Any) -> bool:
    """Whether two results are bitwise the same."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left, right)
    if isinstance(left, dict):
        return isinstance(right, dict) and left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list):
        return isinstance(right, list) and len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)

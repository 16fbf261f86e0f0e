"""The selftest is exact on the CPU and on the virtual accelerator, and says so in one JSON object."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import tide
from lowtide.cli.main import app
from lowtide.runtime.selftest import POLICIES, Size, run_selftest
from lowtide.runtime.swapped import Swapped

TINY = Size(layers=4, width=64, sequence=64, batch=2, rounds=1)


def test_the_virtual_accelerator_passes() -> None:
    tide.configure(preset="h100")
    result = run_selftest(torch.device("tide"), TINY)
    assert result["exact"]
    assert len(result["parity"]) == 2 * len(POLICIES)
    steps = {step["policy"]: step for step in result["steps"]}
    assert steps["recompute whole layers"]["peak_saved_bytes"] > 0
    assert steps["swap everything"]["copy_seconds"] > 0
    assert not tide.races()
    json.dumps(result)


def test_the_command_writes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    result = CliRunner().invoke(app, ["selftest", "--device", "cpu", "--small", "--output", str(path)])
    assert result.exit_code == 0, result.output
    assert json.loads(path.read_text())["exact"] is True
    assert "16 of 16 runs" in result.stdout


def test_a_device_that_is_not_exact_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    original = Swapped.tensor
    monkeypatch.setattr(Swapped, "tensor", lambda self: original(self) * 2)
    path = tmp_path / "cpu.json"
    result = CliRunner().invoke(app, ["selftest", "--device", "cpu", "--small", "--output", str(path)])
    assert result.exit_code == 1
    assert json.loads(path.read_text())["exact"] is False
    assert "was unpacked with other bytes" in result.stdout.replace("\n", " ")

"""``lowtide calibrate`` writes a file that a plan can be made with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lowtide.cli.main import app
from lowtide.cost.devices import find_device
from lowtide.trace.trace import Kernel, Part, Trace


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["calibrate", *arguments], env={"COLUMNS": "120"})
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    layer = Part(name="Layer", kernels=(Kernel("aten::mm", shape="f32[64,64],f32[64,64]", flops=2 * 64**3),))
    file = tmp_path / "trace.json"
    empty = {name: Part(name=name) for name in ("before", "after")}
    Trace(model="tiny", parts=(layer,), layers=(0,), **empty).save(file)
    return file


@pytest.mark.slow
def test_a_device_is_measured_and_written_with_a_traces_kernels(tmp_path: Path, trace: Path) -> None:
    file = tmp_path / "cpu.json"
    code, out, err = run(str(trace), "--device", "cpu", "--like", "h100", "--seconds", "1", "-o", str(file))
    assert (code, err) == (0, "")
    assert "1 kernels measured one by one" in out
    assert "thread" in out
    device = find_device(file)
    assert list(device.measured) == ["aten::mm|float32|f32[64,64],f32[64,64]"]
    assert device.interconnect == find_device("h100").interconnect
    assert 0 < device.efficiency["matmul"] <= 1.5


@pytest.mark.slow
def test_json_is_the_device(tmp_path: Path) -> None:
    code, out, _ = run("--device", "cpu", "--seconds", "1", "--json", "-o", str(tmp_path / "cpu.json"))
    assert code == 0
    assert json.loads(out) == json.loads((tmp_path / "cpu.json").read_text())


def test_what_cannot_be_measured_is_said_before_measuring(tmp_path: Path) -> None:
    code, _, err = run("--device", "cpu", "--like", "h1000")
    assert code == 1
    assert "error: no device 'h1000'" in err
    code, _, err = run("--device", "spam")
    assert code == 1
    assert "error: --device spam" in err
    code, _, err = run("no_such_model", "--device", "cpu")
    assert code == 1
    assert "error:" in err

"""Tokens a second and MFU in the log are those of a plan: one count of FLOPs, one table of devices."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lowtide.cli.traced import LayoutOptions, trace_of
from lowtide.cost.devices import find_device
from lowtide.planner.workload import workload_of
from support.commands import TINY, log, merged, train

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"parallel_config": {"data_parallel": 1, "model_parallel": 2}},
    "pipeline": {"parallel_config": {"pipeline_stage": 2, "micro_batch_num": 2}},
}


@pytest.mark.parametrize("layout", [pytest.param(name, marks=pytest.mark.slow) for name in ("tensor", "pipeline")])
def test_mfu_is_the_plans_flops_over_the_peak_of_the_named_device(tmp_path: Path, layout: str) -> None:
    document = merged(TINY, LAYOUTS[layout])
    run = train(tmp_path, document, "--nproc", "2", "--device", "cpu")
    assert run.returncode == 0, run.stderr
    traced = trace_of(str(tmp_path / "run.yaml"), LayoutOptions())  # what `lowtide plan` traces
    workload = workload_of(traced.trace, find_device("cpu"), traced.pipeline)
    assert workload.flops > 0
    steps = [json.loads(line) for line in (tmp_path / "output" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    for step in steps:
        assert step["mfu"] == workload.flops / (workload.peak_flops * step["seconds"])
        assert step["tokens_per_second"] == step["tokens"] / step["seconds"]
    assert len(re.findall(r"samples/s/p, [\d,]+ tokens/s, MFU \d+\.\d%  ", log(tmp_path))) == 2
    assert "MFU is left out" not in log(tmp_path)
    assert [file.name for file in (tmp_path / "logs").iterdir()] == ["worker_0.log"]  # rank 1 has nothing of its own


def test_mfu_is_left_out_on_a_cpu_and_the_log_says_why_once(tmp_path: Path) -> None:
    run = train(tmp_path, TINY)
    assert run.returncode == 0, run.stderr
    assert log(tmp_path).count("MFU") == 1
    assert "MFU is left out of the log: the run is on the CPU" in log(tmp_path)
    assert len(re.findall(r"samples/s/p, [\d,]+ tokens/s  ", log(tmp_path))) == 2


def test_a_device_that_is_not_known_ends_the_command(tmp_path: Path) -> None:
    run = train(tmp_path, TINY, "--device", "h1000")
    assert run.returncode == 1
    assert "no device 'h1000'" in run.stderr

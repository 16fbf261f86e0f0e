"""The examples of the MindSpore Transformers guide, trained end to end, and looked at with the guide's own commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from support.guide_examples import DEEPSEEK, FORTY_EIGHT_LAYERS, FORTY_EIGHT_LINES, SWAP_CASES

pytestmark = pytest.mark.xdist_group("guides")  # each of these has as many processes as the machine has to give

TINY = """
model:
  model_config:
    vocab_size: 64
    hidden_size: 32
    num_attention_heads: 2
    intermediate_size: 64
    seq_length: 64
runner_config:
  epochs: 1
  batch_size: 1
  stop_step: 3
runner_wrapper:
  use_clip_grad: true
lr_schedule:
  type: ConstantWarmUpLR
  learning_rate: 1.0e-3
train_dataset:
  data_loader:
    type: SyntheticDataLoader
    sizes: [64, 0, 0]
"""


def train(directory: Path, text: str, more: dict[str, Any], processes: int) -> None:
    """Start the command as the guide starts the reference, in a directory of its own."""
    yaml = YAML(typ="safe")
    document: dict[str, Any] = {}
    for part in (yaml.load(TINY), yaml.load(text), more):
        merge(document, part)
    (directory / "guide.yaml").write_text(json.dumps(document))  # JSON is YAML, and keeps the order
    command = [sys.executable, "-m", "lowtide", "train", "--config", "guide.yaml", "--run_mode", "train"]
    command += ["--use_parallel", "True", "--nproc", str(processes), "--log-dir", "output/msrun"]
    environment = os.environ | {
        "GLOG_v": "1",
        "MS_MEMORY_STATISTIC": "1",
        "ENABLE_LAZY_INLINE_NO_PIPELINE": "1",
    }
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


def merge(document: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(document.get(key), dict):
            merge(document[key], value)
        else:
            document[key] = value


def look(directory: Path, command: str) -> list[str]:
    """What a command of the guide finds, without the time and place that begin each line."""
    found = subprocess.run(["bash", "-c", command], cwd=directory, capture_output=True, text=True, check=True)
    return [line.partition("-INFO - ")[2] for line in found.stdout.splitlines() if "-INFO - " in line]


def receipts(directory: Path) -> list[dict[str, Any]]:
    files = sorted((directory / "output").glob("receipts*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


# Eight processes have two cores to share.
@pytest.mark.slow
@pytest.mark.parametrize("case", SWAP_CASES)
def test_a_swap_case_trains_on_eight_processes_and_the_guides_command_finds_the_guides_lines(
    case: str, tmp_path: Path
) -> None:
    text, command, lines = SWAP_CASES[case]
    train(tmp_path, text, {}, 8)
    found = look(tmp_path, command)
    if "-C 1" in command:  # the lines around those that match are there too
        begin = found.index(lines[0])
        assert found[begin : begin + len(lines)] == lines
    else:
        assert found == lines
    swapped = [one for line in receipts(tmp_path) for one in line["settings"] if one["action"].startswith("swap")]
    assert swapped
    assert all(one["moved_bytes"] > 0 for one in swapped), swapped


@pytest.mark.slow
def test_the_48_layer_example_trains_on_five_stages_with_two_chunks_each(tmp_path: Path) -> None:
    placed = {
        "model": {
            "model_config": {"num_layers": 48, "pp_interleave_num": 2, "offset": [[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]}
        },
        "parallel_config": {"pipeline_stage": 5, "micro_batch_num": 5},
    }
    train(tmp_path, FORTY_EIGHT_LAYERS, placed, 5)
    found = look(tmp_path, "cat output/msrun/worker_0.log | grep Formative")
    assert [line for line in found if "exclude" not in line] == FORTY_EIGHT_LINES
    whole = {
        line["layers"][layer]
        for line in receipts(tmp_path)
        for one in line["settings"]
        if one["setting"] == "the whole layer"
        for layer in one["layers"]
    }
    assert whole == {0, 1, 4, 24}
    repeated = [one for line in receipts(tmp_path) for one in line["operators"] if one["recomputes"]]
    assert {one["operator"] for one in repeated} >= {"feed_forward.silu", "feed_forward.mul"}


@pytest.mark.slow
def test_the_deepseek_example_trains_on_sixteen_stages(tmp_path: Path) -> None:
    placed = {
        "model": {
            "model_config": {"num_layers": 61, "offset": [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0]},
        },
        "parallel_config": {"pipeline_stage": 16, "micro_batch_num": 16},
    }
    train(tmp_path, DEEPSEEK, placed, 16)
    (line,) = look(tmp_path, "cat output/msrun/worker_0.log | grep 'Formative layer_recompute'")
    assert line == "Formative layer_recompute: [[3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 3, 2, 0]]"

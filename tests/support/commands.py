"""The command itself, in a process and a directory of its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from support.forked import run_lowtide

__all__ = ["TINY", "check", "log", "merged", "receipts", "train"]

TINY: dict[str, Any] = {
    "seed": 3,
    "model": {
        "model_config": {
            "num_layers": 2,
            "vocab_size": 64,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 64,
            "moe_intermediate_size": 32,
            "seq_length": 16,
        }
    },
    "lr_schedule": {"type": "ConstantWarmUpLR", "learning_rate": 1.0e-3},
    "runner_config": {"epochs": 1, "batch_size": 2, "stop_step": 2},
    "train_dataset": {"data_loader": {"type": "SyntheticDataLoader", "sizes": [64, 0, 0]}},
}
"""A run of a tiny model that takes seconds."""


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    """One document of several; what comes later wins, key by key."""
    document: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            inner = document.get(key)
            both = isinstance(inner, dict) and isinstance(value, dict)
            document[key] = merged(inner, value) if both else value  # type: ignore[arg-type]
    return document


def train(directory: Path, document: dict[str, Any], *flags: str) -> subprocess.CompletedProcess[str]:
    """``lowtide train`` of a document; the logs are in ``logs``, the run in ``output``."""
    return _run(directory, document, "train", "run.yaml", "--log-dir", "logs", *flags)


def check(directory: Path, document: dict[str, Any], *flags: str) -> subprocess.CompletedProcess[str]:
    """``lowtide check`` of a document."""
    return _run(directory, document, "check", "run.yaml", *flags)


def log(directory: Path, rank: int = 0) -> str:
    """What a rank of the last run logged."""
    return (directory / "logs" / f"worker_{rank}.log").read_text()


def receipts(directory: Path, rank: int = 0) -> list[dict[str, Any]]:
    """What a rank of the run says that happened."""
    file = directory / "output" / ("receipts.jsonl" if rank == 0 else f"receipts.{rank}.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def _run(directory: Path, document: dict[str, Any], *arguments: str) -> subprocess.CompletedProcess[str]:
    (directory / "run.yaml").write_text(json.dumps(document, indent=1))  # JSON is YAML, and keeps the order
    ended = run_lowtide(list(arguments), directory)
    assert ended.code is not None, ended.error
    return subprocess.CompletedProcess(arguments, ended.code, ended.output, ended.error)

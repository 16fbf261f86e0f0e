"""Every step as one JSON object on one line: ``metrics.jsonl``."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from lowtide.train.record import StepRecord

__all__ = ["JsonLines"]


class JsonLines:
    """Appends each step to a file, so that it holds each step exactly once, however often the run was interrupted.

    ``after`` is the step the run resumes from, 0 for a fresh run. Lines of later steps, which are about to be run
    again, are cut off, and so is a line that a kill left half written. A number that is not finite is written as null.
    """

    def __init__(self, file: Path, *, after: int = 0) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        _cut(file, after)
        self._stream = file.open("a", encoding="utf-8", buffering=1)  # a line is in the system's hands once written

    def step(self, record: StepRecord) -> None:
        """Write the step."""
        values = {**dataclasses.asdict(record), "tokens_per_second": record.tokens_per_second}
        self._stream.write(json.dumps(_plain(values), separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def _cut(file: Path, after: int) -> None:
    try:
        stream = file.open("r+b")
    except FileNotFoundError:
        return
    with stream:
        end = 0
        for line in stream:
            if not line.endswith(b"\n") or _step_of(line) > after:
                break
            end += len(line)
        stream.truncate(end)


def _step_of(line: bytes) -> float:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):  # not a line of ours, or half of one: nothing after it can be trusted
        return math.inf
    return step if isinstance(step, int) else math.inf


def _plain(value: Any) -> Any:
    """JSON has no word for infinity and not-a-number."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return value

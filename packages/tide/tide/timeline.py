"""What a program did on the virtual clock, as a Chrome or Perfetto trace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import _C


@dataclass(slots=True)
class Timeline:
    """Spans of kernels and copies, and samples of allocated memory."""

    spans: list[dict[str, Any]] = field(default_factory=list)
    """name, lane ("stream 0", "link in", ...), device, start, duration, bytes, flops"""
    memory: list[dict[str, int]] = field(default_factory=list)
    """device, time, allocated, reserved"""

    def busy(self, lane: str) -> int:
        """Nanoseconds the lane had something to do."""
        return sum(span["duration"] for span in self.spans if span["lane"] == lane)

    def makespan(self) -> int:
        """From the start of the first span to the end of the last, in nanoseconds."""
        if not self.spans:
            return 0
        start = min(span["start"] for span in self.spans)
        return max(span["start"] + span["duration"] for span in self.spans) - start

    def to_chrome(self) -> dict[str, Any]:
        """A trace for chrome://tracing or ui.perfetto.dev. Times there are microseconds."""
        lanes: dict[tuple[int, str], int] = {}
        events: list[dict[str, Any]] = []
        for span in self.spans:
            key = (span["device"], span["lane"])
            if key not in lanes:
                lanes[key] = len(lanes) + 1
                name = {"name": span["lane"]}
                identity = {"pid": span["device"], "tid": lanes[key]}
                events.append({"ph": "M", "name": "thread_name", "args": name, **identity})
            events.append(
                {
                    "ph": "X",
                    "name": span["name"],
                    "pid": span["device"],
                    "tid": lanes[key],
                    "ts": span["start"] / 1000,
                    "dur": span["duration"] / 1000,
                    "args": {"bytes": span["bytes"], "flops": span["flops"]},
                }
            )
        for device in sorted({span["device"] for span in self.spans}):
            name = {"name": f"tide:{device}"}
            events.append({"ph": "M", "name": "process_name", "pid": device, "args": name})
        for sample in self.memory:
            values = {"allocated": sample["allocated"], "reserved": sample["reserved"]}
            events.append(
                {
                    "ph": "C",
                    "name": "memory",
                    "pid": sample["device"],
                    "ts": sample["time"] / 1000,
                    "args": values,
                }
            )
        return {"traceEvents": events, "displayTimeUnit": "ns"}

    def save(self, path: str | Path) -> None:
        """Write the Chrome trace."""
        Path(path).write_text(json.dumps(self.to_chrome()))


@contextmanager
def record() -> Iterator[Timeline]:
    """Record what happens inside; the timeline is filled when the block ends.

    >>> with record() as timeline:
    ...     _ = torch.ones(4, device="tide") + 1
    >>> timeline.save("trace.json")
    """
    timeline = Timeline()
    torch.accelerator.synchronize()
    _C.record_timeline(True)
    try:
        yield timeline
    finally:
        torch.accelerator.synchronize()
        data = _C.timeline()
        _C.record_timeline(False)
        names = ("name", "lane", "device", "start", "duration", "bytes", "flops")
        timeline.spans = [dict(zip(names, span, strict=True)) for span in data["spans"]]
        samples = ("device", "time", "allocated", "reserved")
        timeline.memory = [dict(zip(samples, sample, strict=True)) for sample in data["memory"]]

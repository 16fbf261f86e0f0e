"""What happened since the last receipt, counted where it happens."""

from __future__ import annotations

import warnings
from collections import deque
from time import perf_counter
from typing import Any, Literal, TypeAlias

import torch

from lowtide.cost.stopwatch import moment, seconds_between
from lowtide.runtime.host import HostBuffer

__all__ = ["WHOLE", "Ledger", "Line"]

WHOLE = "the whole layer"
"""What the receipt calls a layer that is recomputed as a whole."""
WAITING = 256
"""Timed events that wait for the device, at least, before those that it has reached are read."""

Clock: TypeAlias = Literal["copy_seconds", "stall_seconds", "recompute_seconds"]


class Line:
    """The counts of one operator of one layer."""

    __slots__ = (
        "copy_seconds", "freed_bytes", "handed_back_bytes", "kept_bytes", "layer", "moved_bytes",
        "notes", "operator", "recompute_seconds", "recomputes", "spared_bytes", "stall_seconds", "stash", "swaps",
    )  # fmt: skip

    def __init__(self, layer: int, operator: str) -> None:
        self.layer, self.operator = layer, operator
        self.notes: dict[str, int] = {}
        self.stash: list[HostBuffer] = []
        """Host memory this operator used before, in the shape it had: in the next step it fits again."""
        self.clear()

    def clear(self) -> None:
        """Reset all counts."""
        self.swaps = self.recomputes = 0
        self.moved_bytes = self.spared_bytes = self.freed_bytes = self.handed_back_bytes = self.kept_bytes = 0
        self.copy_seconds = self.stall_seconds = self.recompute_seconds = 0.0
        self.notes.clear()

    @property
    def whose(self) -> str:
        """The operator and where it is, in words."""
        return f"{self.operator} of layer {self.layer}"

    @property
    def what(self) -> str:
        """The same for a profile: an operator goes by its name, a whole layer by its index."""
        return f"layer {self.layer}" if self.operator == WHOLE else self.operator

    def keep(self, size: int, reason: str) -> None:
        """``size`` bytes that were to leave stay on the device."""
        self.kept_bytes += size
        self.note(reason)

    def note(self, what: str) -> None:
        """Something that went otherwise than asked for, and how often."""
        self.notes[what] = self.notes.get(what, 0) + 1


class Ledger:
    """The lines of all operators, and the events that still have to be read."""

    def __init__(self) -> None:
        self.lines: dict[tuple[int, str], Line] = {}
        self.timed: deque[tuple[Line, Clock, Any, Any]] = deque()
        """In the order of their ends, but for streams that overtake each other."""
        self.without_effect: dict[str, None] = {}
        """Settings that turned out to have no effect, in words: they have none in the next step either."""
        self.profiled: set[int] = set()
        """Layers that kept everything in a run, since they were profiled in it."""

    def idle(self, what: str) -> None:
        """A setting has no effect: warn of it, once, and have every receipt say it."""
        if what not in self.without_effect:
            self.without_effect[what] = None
            warnings.warn(f"lowtide: {what}", UserWarning, stacklevel=3)

    def line(self, layer: int, operator: str) -> Line:
        """The line of one operator."""
        found = self.lines.get((layer, operator))
        if found is None:
            found = self.lines[layer, operator] = Line(layer, operator)
        return found

    begin = staticmethod(moment)
    """Note that something begins on a device; as it is, since every recomputed operator pays for a call of ours."""

    def end(self, line: Line, device: torch.device, begin: Any) -> None:
        """Note that a recomputation has ended."""
        if device.type == "cpu":
            line.recompute_seconds += perf_counter() - begin
        else:
            self.took(line, "recompute_seconds", begin, self.begin(device))

    def took(self, line: Line, clock: Clock, begin: Any, end: Any) -> None:
        """Count what is between two events, once the device has reached them: a run without receipts does not grow."""
        self.timed.append((line, clock, begin, end))
        while len(self.timed) > WAITING and self.timed[0][3].query():
            self._read()

    def settle(self) -> None:
        """Read all events. Waits for the device."""
        while self.timed:
            self._read()

    def _read(self) -> None:
        line, clock, begin, end = self.timed.popleft()
        begin.synchronize()
        end.synchronize()
        setattr(line, clock, getattr(line, clock) + max(0.0, seconds_between(begin, end)))

    def clear(self) -> None:
        """Reset all counts."""
        self.timed.clear()
        self.profiled.clear()
        for line in self.lines.values():
            line.clear()

"""What a replay does, one after the other: numbers, since many million of them are looked at."""

from __future__ import annotations

from typing import TypeAlias

__all__ = [
    "ADD", "CALL", "DONE", "END", "FREE", "HOLD", "LET", "MAKE", "RETAIN", "RUN", "SAVE", "SYNC", "UNPACKED", "USE",
    "Code",
]  # fmt: skip

Code: TypeAlias = tuple[int, int]
"""An event: one of the numbers below, and the event's own number."""

MAKE, FREE, RUN, SAVE, CALL, END, USE, DONE, ADD, LET, SYNC = range(11)
HOLD, RETAIN, UNPACKED = range(11, 14)
"""Of the first half of a backward, for the second: what a kernel will read is held; a saved tensor that was reloaded is
held; a node that the second half does not run is done."""

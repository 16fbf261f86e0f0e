"""Sums of gradients, as autograd makes them where nobody listens.

Where two gradients meet, autograd adds one into the other if nobody else holds it, but not under a mode: then it makes
a new tensor. What was recorded is rewritten to what would happen without the mode.
"""

from __future__ import annotations

from lowtide.trace.recorder import Recorder
from lowtide.trace.trace import Event

__all__ = ["add_in_place"]


def add_in_place(recorder: Recorder) -> None:
    """Write sums of gradients as autograd makes them where no mode is: into one of the two."""
    same: dict[int, int] = {}

    def now(number: int) -> int:
        while number in same:
            number = same[number]
        return number

    for place, events in recorder.streams.items():
        if place[0] != "backward":
            continue
        kept: list[Event] = []
        skip: set[tuple[int, int]] = set()
        for at, (what, number) in enumerate(events):
            if (at, number) in skip:
                continue
            if what == "run" and number in recorder.sums:
                one, other, total = recorder.sums[number]
                freed = {}
                for after in range(at + 1, len(events)):
                    if events[after][0] != "free":
                        break
                    freed[now(events[after][1])] = (after, events[after][1])
                into = next((now(side) for side in (one, other) if side >= 0 and now(side) in freed), None)
                if into is not None and _is_plain(recorder, into, total):
                    skip.add(freed[into])
                    kept.remove(("make", total))
                    same[total] = into
                    kernel = recorder.kernels[number]
                    recorder.kernels[number] = kernel._replace(kind="aten::add_", writes=(into,))
            kept.append((what, now(number) if what in ("make", "free") else number))
        recorder.streams[place] = kept
    recorder.kernels = [
        kernel._replace(reads=tuple(map(now, kernel.reads)), writes=tuple(map(now, kernel.writes)))
        for kernel in recorder.kernels
    ]
    recorder.gradients = set(map(now, recorder.gradients))
    recorder.passed_back = {part: now(number) for part, number in recorder.passed_back.items()}


def _is_plain(recorder: Recorder, into: int, total: int) -> bool:
    """Whether a gradient can be added to: it was made in backward, and is as large as the sum."""
    storage = recorder.storages[into]
    return storage.made[0] == "backward" and storage.size == recorder.storages[total].size

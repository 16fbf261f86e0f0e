"""What backward does in place while no dispatch mode is on.

Where two gradients meet, autograd adds the second into the first if nothing else holds that, but not under a mode: then
it makes a new tensor. What was recorded is rewritten to what would happen without the mode. A first one that is a view,
as a linear layer gives for a batch of sequences, holds its base, and a subclass is never added to: there autograd makes
a new tensor in any case. Some nodes fill zeros with what they were given, and under a mode they make a new tensor too.
"""

from __future__ import annotations

from lowtide.trace.recorder import Recorder
from lowtide.trace.trace import Event

__all__ = ["change_in_place"]


def change_in_place(recorder: Recorder) -> None:
    """Rewrite backward to what happens without a mode: in place, where nothing else holds what is changed."""
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
            if what == "run" and number in recorder.into:
                into, total = now(recorder.into[number][0]), recorder.into[number][1]
                freed = {}
                for after in range(at + 1, len(events)):
                    if events[after][0] != "free":
                        break
                    freed[now(events[after][1])] = (after, events[after][1])
                if into in freed and _is_plain(recorder, into, total):
                    skip.add(freed[into])
                    kept.remove(("make", total))
                    same[total] = into
                    kernel = recorder.kernels[number]
                    recorder.kernels[number] = kernel._replace(kind=f"{kernel.kind}_", writes=(into,))
            kept.append((what, now(number) if what in ("make", "free") else number))
        recorder.streams[place] = kept
    recorder.kernels = [
        kernel._replace(reads=tuple(map(now, kernel.reads)), writes=tuple(map(now, kernel.writes)))
        for kernel in recorder.kernels
    ]
    recorder.gradients = set(map(now, recorder.gradients))
    recorder.passed_back = {part: now(number) for part, number in recorder.passed_back.items()}


def _is_plain(recorder: Recorder, into: int, total: int) -> bool:
    """Whether a storage can be changed: it was made in backward, and is as large as the result."""
    storage = recorder.storages[into]
    return storage.made[0] == "backward" and storage.size == recorder.storages[total].size

"""Seconds of calls on a device, by its own events; on a CPU, by the clock.

[Note: behind a copy]
An event's time is when the device reached it. Between two events around one kernel lies also what the host needed to
issue the kernel, if the device had nothing to do meanwhile. So a copy from pinned memory is issued first, on the
same stream: while it runs, the kernels queue up behind it and then follow each other at once. If the first event has
passed when the last kernel has been issued, the copy was too short, and a longer one is tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch

__all__ = ["DeviceWatch", "HostWatch", "Watch", "moment", "seconds_between", "settled_seconds", "watch_for"]

Call: TypeAlias = Callable[[], Any]

SHORTEST, LONGEST = 1 << 20, 1 << 26
"""Bytes of the copy that kernels wait behind."""
ALIKE = 1e-4
"""Two rounds that differ by less are of a clock without noise."""


def moment(device: torch.device) -> Any:
    """Now: an event, which the device reaches when all that was issued before has run; on a CPU the clock's time."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """Between two moments that the device has reached."""
    return float(end - begin) if isinstance(begin, float) else float(begin.elapsed_time(end)) / 1000


class Watch(Protocol):
    """Measures a call."""

    quantile: float
    """Which of several measurements counts, as a share of those below it."""

    def __call__(self, call: Call, repeat: int = 1) -> float:
        """Seconds of one call, the mean of ``repeat`` in a row."""


class DeviceWatch:
    """Seconds of the device, without those of issuing. See [Note: behind a copy]."""

    quantile = 0.5

    def __init__(self, device: torch.device, longest: int = LONGEST) -> None:
        self.host = torch.zeros(longest, dtype=torch.uint8, device="cpu").pin_memory()
        self.landing = torch.zeros(longest, dtype=torch.uint8, device=device)
        self.begin, self.end = (torch.Event(device, enable_timing=True) for _ in range(2))

    def __call__(self, call: Call, repeat: int = 1) -> float:
        longest = self.host.numel()
        size = min(SHORTEST * max(1, repeat // 4), longest)
        while True:
            self.landing[:size].copy_(self.host[:size], non_blocking=True)
            seconds, queued = self._between(call, repeat)
            if queued or size >= longest:
                return seconds
            size = min(4 * size, longest)

    def issued(self, call: Call, repeat: int) -> float:
        """Seconds of one call on a device that waits for nothing else: the longer of issuing and running it."""
        torch.accelerator.synchronize()
        return self._between(call, repeat)[0]

    def _between(self, call: Call, repeat: int) -> tuple[float, bool]:
        self.begin.record()
        for _ in range(repeat):
            call()
        self.end.record()
        queued = not self.begin.query()
        self.end.synchronize()
        return self.begin.elapsed_time(self.end) / 1e3 / repeat, queued


class HostWatch:
    """Seconds of the host, for a device that the host itself is.

    With one thread they are that thread's own, which other programs hardly disturb; with several, those of the clock.
    """

    quantile = 0.25  # other programs only ever add to it

    def __init__(self) -> None:
        self.clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def __call__(self, call: Call, repeat: int = 1) -> float:
        begin = self.clock()
        for _ in range(repeat):
            call()
        return (self.clock() - begin) / repeat

    def issued(self, call: Call, repeat: int) -> float:
        """Issuing and running are one."""
        return 0.0


def watch_for(device: torch.device, longest: int = LONGEST) -> DeviceWatch | HostWatch:
    """What measures calls on a device; it takes ``longest`` bytes there."""
    return HostWatch() if device.type == "cpu" else DeviceWatch(device, longest)


def settled_seconds(
    calls: Sequence[Call], watch: Watch, *, rounds: int, seconds: float = float("inf"), shortest: float = 50e-6
) -> list[float]:
    """A quantile of each call over rounds of all of them, so that a disturbance meets few rounds of each.

    Each has been called before: the first call also loads, compiles and allocates. A call shorter than ``shortest`` is
    called several times in a row until it takes about that long. Two rounds are enough where
    they are alike; at least three are run otherwise, and no more once they have taken ``seconds``.
    """
    begin = time.perf_counter()
    first = [watch(call) for call in calls]
    counts = [max(1, min(20, round(shortest / max(one, 1e-9)))) for one in first]
    found = [[one] if count == 1 else [] for one, count in zip(first, counts, strict=True)]
    for number in range(rounds):
        open_calls = [place for place, values in enumerate(found) if not _alike(values)]
        if not open_calls or (number >= 3 and time.perf_counter() - begin > seconds):
            break
        for place in open_calls:
            found[place].append(watch(calls[place], counts[place]))
    return [sorted(values)[int(len(values) * watch.quantile)] for values in found]


def _alike(values: Sequence[float]) -> bool:
    return len(values) >= 2 and abs(values[-1] - values[-2]) <= ALIKE * values[-1]

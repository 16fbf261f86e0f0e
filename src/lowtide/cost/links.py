"""Measure the link between a device and the host's memory, and what it costs to issue a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lowtide.cost.stopwatch import DeviceWatch, HostWatch, settled_seconds

__all__ = ["Links", "measure_links"]

SMALL, LARGE = 1 << 12, 1 << 24
"""Bytes of the copies that a link is measured with."""
LEAST_LARGE, ENOUGH = 1 << 18, 0.5e-3
"""Copies of so many bytes and more are measured, until one takes so many seconds: on a slow link a run would wait for
larger ones."""
TINY = 1
"""Elements of a kernel that is all latency."""
ISSUED = 100
"""Kernels that are issued in a row to see what issuing takes."""


class Links(NamedTuple):
    """What was measured. Times are seconds, rates bytes per second."""

    rate_out: float
    """To the host's memory."""
    rate_in: float
    """From the host's memory."""
    copy_latency: float
    """Of an empty copy, the mean of both ways."""
    launch: float
    """Of issuing a kernel."""
    kernel_latency: float
    """Of an empty kernel."""


def measure_links(device: torch.device, watch: DeviceWatch | HostWatch, *, rounds: int, largest: int = LARGE) -> Links:
    """Measure a device's links with copies of at most ``largest`` bytes, which are on the device meanwhile."""
    latency, launch = _latencies(device, watch, rounds)
    latency_out, rate_out = _link(device, watch, "out", rounds, largest)
    latency_in, rate_in = _link(device, watch, "in", rounds, largest)
    return Links(rate_out, rate_in, (latency_out + latency_in) / 2, launch, latency)


def _latencies(device: torch.device, watch: DeviceWatch | HostWatch, rounds: int) -> tuple[float, float]:
    """Seconds of an empty kernel, and of issuing one."""
    tiny = torch.ones(TINY, device=device)
    call = tiny.neg
    call()
    (latency,) = settled_seconds([call], watch, rounds=rounds)
    issued = sorted(watch.issued(call, ISSUED) for _ in range(5))[2]
    if issued <= 1.05 * latency:
        return latency, 0.0  # it hides behind any kernel
    return latency, issued - latency / ISSUED  # the last kernel still runs when all are issued


def _link(
    device: torch.device, watch: DeviceWatch | HostWatch, way: Literal["out", "in"], rounds: int, large: int
) -> tuple[float, float]:
    """Latency and bytes per second of a link, by a small copy and a large one."""
    host = torch.zeros(large, dtype=torch.uint8, device="cpu")
    if device.type != "cpu":
        host = host.pin_memory()
    there = torch.zeros(large, dtype=torch.uint8, device=device)
    source, destination = (there, host) if way == "out" else (host, there)

    def copy_of(size: int) -> Callable[[], Tensor]:
        return lambda: destination[:size].copy_(source[:size], non_blocking=True)

    most, large = large, min(large, LEAST_LARGE)
    copy_of(large)()
    while large < most and watch(copy_of(large)) < ENOUGH:
        large = min(4 * large, most)
    times = []
    for size in (SMALL, large):  # not in turns: on a CPU the large one would drive the small one out of the caches
        call = copy_of(size)
        call()
        times += settled_seconds([call], watch, rounds=rounds)
    short, long = times
    rate = (large - SMALL) / max(long - short, 1e-9)
    return max(0.0, short - SMALL / rate), rate

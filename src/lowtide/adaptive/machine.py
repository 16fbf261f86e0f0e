"""The device that a run is on, as a plan needs to know it: measured in less than a second, in a few megabytes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from lowtide._torch_private.memory import memory_stats
from lowtide.cost.calibrate import device_name, measured_device
from lowtide.cost.device import Device
from lowtide.cost.fit import Sample, fit
from lowtide.cost.kernel import is_free
from lowtide.cost.links import Links, measure_links
from lowtide.cost.stopwatch import watch_for
from lowtide.out_of_memory import is_out_of_memory
from lowtide.trace.trace import Kernel

__all__ = ["available_capacity", "available_host_memory", "host_links", "profile_device"]

LARGEST, LEAST = 1 << 22, 1 << 16
"""Bytes of the largest copy: the first, or less on OOM, down to the second."""
ROUNDS = 10
"""The most measurements of a copy."""


def profile_device(
    device: torch.device, kernels: Iterable[Kernel] = (), *, like: Device | None = None, links: Links | None = None
) -> Device:
    """The current device: its links both ways, what issuing a kernel costs, and the memory that a run may have.

    Of ``kernels``, those with measured seconds, such as all of a Trace, calibrate the model of those that were not
    measured: the copies and sums that a Policy adds. The links to other devices are those of ``like``. ``links`` are
    those to the host, where :func:`host_links` has measured them.

    ``profile_device(torch.device("cuda"), kernels_of(trace))``
    """
    links = links or host_links(device)
    samples = [
        Sample(one.kind, one.dtype, one.flops, one.touched, one.seconds)
        for one in kernels
        if one.seconds is not None and not one.ranks and not is_free(one.kind)
    ]
    return replace(
        measured_device(device, links, fit(samples, links.kernel_latency), like),
        capacity=available_capacity(device),
        devices_per_node=_ranks_here(),
        host_memory=available_host_memory(),
        notes=(f"measured on {device_name(device)} during a run, {len(samples)} kernels",),
    )


def host_links(device: torch.device) -> Links:
    """The links to the host, measured with as large copies as there is room for; takes most of the time."""
    largest = LARGEST
    while True:
        try:
            with torch.no_grad():
                return measure_links(device, watch_for(device, largest), rounds=ROUNDS, largest=largest)
        except RuntimeError as error:
            largest //= 4
            if largest < LEAST or not is_out_of_memory(error):
                raise


def available_capacity(device: torch.device, reserved: int | None = None) -> int:
    """Bytes that this process has reserved of the device, ``reserved`` if that is known, and those that are free."""
    if device.type == "cpu":
        return available_host_memory()
    free, total = torch.accelerator.get_memory_info(device)
    return min(int(total), int(free) + (memory_stats(device).reserved if reserved is None else reserved))


def available_host_memory() -> int:
    """Bytes of the host's memory that are available now; the ranks of a node share them."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _ranks_here() -> int:
    """The number of ranks on this node, as torchrun reports it; else the number of devices."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(count) if count.isdigit() and int(count) else max(1, torch.accelerator.device_count())

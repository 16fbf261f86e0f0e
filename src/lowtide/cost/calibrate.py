"""Measure the device that is here: its links, its kernels, and what it costs to issue one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.cost.device import Device
from lowtide.cost.fit import Sample, fit
from lowtide.cost.kernel import KernelWork, fingerprint, is_free
from lowtide.cost.kernels import kernel_flops
from lowtide.cost.rerun import rerun
from lowtide.cost.shape import ITEM, TensorShape, read_shape
from lowtide.cost.standard import standard_kernels
from lowtide.cost.stopwatch import DeviceWatch, HostWatch, median_seconds, watch_for

__all__ = ["Calibration", "calibrate"]

LINK_SIZES = (1 << 12, 1 << 20, 1 << 22, 1 << 24)
"""Bytes of the copies that the links are measured with."""
TINY = 16
"""Elements of a kernel that is all latency."""
ROUNDS = 15
TOGETHER = 1 << 28
"""Bytes of arguments that are held at one time: kernels are measured in groups of about that many."""


class Calibration(NamedTuple):
    """A device as it was measured, and what could not be."""

    device: Device
    kernels: int
    """Distinct kernels that were measured."""
    failed: dict[str, str]
    """Kernels that could not be run alone, by fingerprint, and why: they are estimated."""


class _Work(NamedTuple):
    """A kernel to measure."""

    kind: str
    dtype: str
    shape: str
    flops: int = 0
    touched: int = 0

    @property
    def key(self) -> str:
        return f"{self.kind}|{self.dtype}|{self.shape}"


def calibrate(
    device: torch.device,
    kernels: Iterable[KernelWork] = (),
    *,
    like: Device | None = None,
    seconds: float = 120.0,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Calibration:
    """Measure a device: links both ways, the time to issue a kernel and of an empty one, and kernels.

    The kernels are those given, such as all of a Trace, whose times go into ``measured``; and always a standard
    set over sizes and dtypes, which the rates and efficiencies of everything else are fitted to. What one process
    cannot measure, the interconnect and the network, is taken from ``like``. About ``seconds`` are spent on a device
    whose clock is noisy, and less on others.

    ``calibrate(torch.device("cuda"), kernels_of(Trace.load("llama.json"))).device.save("h100.json")``
    """
    watch = watch_for(device)
    with torch.no_grad():
        progress("links", 0, 1)
        latency, launch = _latencies(device, watch)
        links = {way: _link(device, watch, way) for way in ("out", "in")}
        given = {one.key: one for one in _distinct(kernels)}
        standard = {one.key: one for one in _standard(device) if one.key not in given}
        samples, failed = _measure([*given.values(), *standard.values()], device, watch, seconds, progress)
    found = fit(samples.values(), latency)
    measured = {key: sample.seconds for key, sample in samples.items()}
    base = like or _unknown(device)
    notes = [
        f"measured on {_name(device)} with torch {torch.__version__}, {len(measured)} kernels",
        "interconnect, network and collectives were not measured: "
        + (f"they are those of {like.name}" if like is not None else "the figures are placeholders"),
    ]
    if device.type == "cpu":
        notes.append(f"{torch.get_num_threads()} threads")
    if missing := sorted({key.partition("|")[0] for key in failed if key in given}):
        notes.append(f"kinds that cannot be run alone, which are estimated: {', '.join(missing)}")
    result = Device(
        name=_name(device),
        capacity=_capacity(device),
        flops={**base.flops, **(found.flops if found else {})},
        memory_bandwidth=found.memory_bandwidth if found else base.memory_bandwidth,
        link_out=links["out"][1],
        link_in=links["in"][1],
        interconnect=base.interconnect,
        network=base.network,
        launch=launch,
        kernel_latency=latency,
        copy_latency=max(0.0, (links["out"][0] + links["in"][0]) / 2),
        collective_latency=base.collective_latency,
        devices_per_node=base.devices_per_node if like else max(1, torch.accelerator.device_count()),
        host_memory=_host_memory(),
        efficiency={"collective": base.efficiency.get("collective", 1.0), **(found.efficiency if found else {})},
        measured={key: measured[key] for key in given if key in measured},
        notes=tuple(notes),
    )
    return Calibration(result, len(measured), {key: why for key, why in failed.items() if key in given})


def _distinct(kernels: Iterable[KernelWork]) -> Iterator[_Work]:
    seen = set()
    for one in kernels:
        if one.ranks or is_free(one.kind) or (key := fingerprint(one)) in seen:
            continue
        seen.add(key)
        yield _Work(one.kind, one.dtype, one.shape, one.flops, one.touched)


def _standard(device: torch.device) -> Iterator[_Work]:
    for kind, dtype, shape in standard_kernels(small=device.type == "cpu"):
        args, kwargs = read_shape(shape)
        yield _Work(kind, dtype, shape, kernel_flops(kind, args, kwargs, None))


def _measure(
    work: Sequence[_Work],
    device: torch.device,
    watch: DeviceWatch | HostWatch,
    seconds: float,
    progress: Callable[[str, int, int], None],
) -> tuple[dict[str, Sample], dict[str, str]]:
    """Samples by fingerprint, and why others could not be measured."""
    samples: dict[str, Sample] = {}
    failed: dict[str, str] = {}
    done = 0
    for group in _groups(work):
        calls: dict[str, tuple[_Work, Callable[[], Any]]] = {}
        for one in group:
            try:
                call = rerun(one.kind, one.shape, device)
                result = call()
            except Exception as error:  # whatever it is, the others can be measured
                failed[one.key] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                continue
            calls[one.key] = one._replace(touched=one.touched or _touched(one, result)), call
        share = seconds * len(group) / len(work)
        found = median_seconds([call for _, call in calls.values()], watch, rounds=ROUNDS, seconds=share)
        for (key, (one, _)), value in zip(calls.items(), found, strict=True):
            samples[key] = Sample(one.kind, one.dtype, one.flops, one.touched, value)
        done += len(group)
        progress("kernels", done, len(work))
    return samples, failed


def _touched(work: _Work, result: Any) -> int:
    """Bytes that a kernel reads and writes: arguments, results, and what it changes in place both ways."""
    args, kwargs = read_shape(work.shape)
    results = [result] if isinstance(result, Tensor) else list(result or ())
    read = sum(_bytes(one) for one in _flat([*args, *kwargs.values()]) if isinstance(one, TensorShape))
    if work.kind.endswith("_"):
        return read + sum(_bytes(one) for one in _flat(args[:1]))
    return read + sum(one.numel() * one.element_size() for one in _flat(results) if isinstance(one, Tensor))


def _bytes(one: TensorShape) -> int:
    """Bytes of its elements, those that an expansion repeats counted once."""
    elements = (size for size, stride in zip(one.shape, one.strides, strict=True) if stride or not size)
    return prod(elements) * ITEM.get(one.dtype, 1)


def _groups(work: Sequence[_Work]) -> Iterator[list[_Work]]:
    group: list[_Work] = []
    held = 0
    for one in work:
        size = _held(one.shape)
        if group and held + size > TOGETHER:
            yield group
            group, held = [], 0
        group.append(one)
        held += size
    if group:
        yield group


def _held(shape: str) -> int:
    args, kwargs = read_shape(shape)
    return sum(one.bytes for one in _flat([*args, *kwargs.values()]) if isinstance(one, TensorShape))


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list):
            yield from _flat(value)
        else:
            yield value


def _latencies(device: torch.device, watch: DeviceWatch | HostWatch) -> tuple[float, float]:
    """Seconds of an empty kernel, and of issuing one."""
    tiny = torch.ones(TINY, device=device)
    call = tiny.neg
    (latency,) = median_seconds([call], watch, rounds=ROUNDS)
    issued = sorted(watch.issued(call, 100) for _ in range(5))[2]
    return latency, issued if issued > 1.05 * latency else 0.0  # it hides behind any kernel


def _link(device: torch.device, watch: DeviceWatch | HostWatch, way: str) -> tuple[float, float]:
    """Latency and bytes per second of a link: the line through the copies' times, by their relative error."""
    host = torch.zeros(max(LINK_SIZES), dtype=torch.uint8)
    if device.type != "cpu":
        host = host.pin_memory()
    there = torch.zeros(max(LINK_SIZES), dtype=torch.uint8, device=device)
    source, destination = (there, host) if way == "out" else (host, there)

    def copy_of(size: int) -> Callable[[], Tensor]:
        return lambda: destination[:size].copy_(source[:size], non_blocking=True)

    times = median_seconds([copy_of(size) for size in LINK_SIZES], watch, rounds=ROUNDS)
    weights = [1 / one**2 for one in times]
    total = sum(weights)
    mean_size = sum(weight * size for weight, size in zip(weights, LINK_SIZES, strict=True)) / total
    mean_time = sum(weight * one for weight, one in zip(weights, times, strict=True)) / total
    rows = list(zip(weights, LINK_SIZES, times, strict=True))
    spread = sum(weight * (size - mean_size) ** 2 for weight, size, _ in rows)
    slope = sum(weight * (size - mean_size) * (one - mean_time) for weight, size, one in rows) / spread
    if slope <= 0:  # noise; the largest copy says most
        return times[0], LINK_SIZES[-1] / times[-1]
    return mean_time - slope * mean_size, 1 / slope


def _name(device: torch.device) -> str:
    module = getattr(torch, device.type, None)
    found = getattr(module, "get_device_name", None)
    if device.type != "cpu" and callable(found):
        try:
            return str(found(device))
        except (RuntimeError, TypeError, AssertionError):
            pass
    return device.type


def _capacity(device: torch.device) -> int:
    if device.type == "cpu":
        return _host_memory()
    return int(torch.accelerator.get_memory_info(device)[1])


def _host_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on every system
        return 1 << 36


def _unknown(device: torch.device) -> Device:
    """What is assumed of a device before anything is measured."""
    return Device(
        name=device.type, capacity=1, flops={"float32": 1e12}, memory_bandwidth=1e11, link_out=1e10, link_in=1e10,
        interconnect=1e10, network=1e10,
    )  # fmt: skip

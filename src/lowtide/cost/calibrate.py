"""Measure the device that is here: its links, its kernels, and what it costs to issue one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.cost.device import Device, Reserve
from lowtide.cost.fit import Fit, Sample, fit
from lowtide.cost.kernel import KernelWork, fingerprint, is_free, kernel_class
from lowtide.cost.kernels import kernel_flops
from lowtide.cost.links import Links, measure_links
from lowtide.cost.rerun import rerun
from lowtide.cost.shape import ITEM, TensorShape, read_shape
from lowtide.cost.standard import standard_kernels
from lowtide.cost.stopwatch import DeviceWatch, HostWatch, settled_seconds, watch_for

__all__ = ["Calibration", "calibrate", "device_name", "measure_more", "measured_device", "unknown_device"]

ROUNDS = 40
"""The most measurements of a kernel."""
LONGEST_CALL = {"matmul": 0.4, "attention": 0.1, "memory": 0.02}
"""Seconds of the clock that a call of the standard set may be expected to take, by class: it stops growing there."""
TOGETHER = 1 << 28
"""Bytes of arguments that are held at one time: kernels are measured in groups of about that many."""


class Calibration(NamedTuple):
    """A measured device, and what could not be measured."""

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
    growth: float | None = None
    """For one of the standard set, its work as a multiple of that of the one before it; 0 for the first."""

    @property
    def key(self) -> str:
        return f"{self.kind}|{self.dtype}|{self.shape}"


def calibrate(
    device: torch.device,
    kernels: Iterable[KernelWork] = (),
    *,
    like: Device | None = None,
    standard: bool = True,
    seconds: float = 120.0,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Calibration:
    """Measure a device: links both ways, the time to issue a kernel and of an empty one, and kernels.

    The kernels are those given, such as all of a Trace, whose times go into ``measured``; and, if ``standard``, a set
    over kinds, sizes and dtypes. The rates and efficiencies that estimate everything else are fitted to both. What one
    process cannot measure, the interconnect and the network, is taken from ``like``. About ``seconds`` are spent on a
    device whose clock is noisy, and less on others.

    ``calibrate(torch.device("cuda"), kernels_of(Trace.load("llama.json"))).device.save("h100.json")``
    """
    watch = watch_for(device)
    with torch.no_grad(), _random_restored(device):
        progress("links", 0, 1)
        links = measure_links(device, watch, rounds=ROUNDS)
        given = {one.key: one for one in _distinct(kernels)}
        more = [one for one in _standard() if one.key not in given] if standard else []
        samples, failed = _measure([*given.values(), *more], device, watch, seconds, progress)
    found = fit(samples.values(), links.kernel_latency)
    measured = {key: sample.seconds for key, sample in samples.items()}
    result = replace(
        measured_device(device, links, found, like),
        capacity=_capacity(device),
        devices_per_node=like.devices_per_node if like else max(1, torch.accelerator.device_count()),
        host_memory=_host_memory(),
        host_bandwidth=like.host_bandwidth if like else 0.0,
        link_sharing=like.link_sharing if like else 1,
        reserve=_reserve(device, like),
        measured={key: measured[key] for key in given if key in measured},
        notes=_notes(device, like, len(measured), {key.partition("|")[0] for key in failed if key in given}),
    )
    return Calibration(result, len(measured), {key: why for key, why in failed.items() if key in given})


def measured_device(device: torch.device, links: Links, found: Fit | None, like: Device | None) -> Device:
    """What was measured of a device, and what was fitted to its kernels; the rest is ``like``'s, or assumed."""
    base = like or unknown_device(device)
    return Device(
        name=device_name(device),
        capacity=base.capacity,
        flops=found.flops if found and found.flops else base.flops,
        memory_bandwidth=found.memory_bandwidth if found else base.memory_bandwidth,
        link_out=links.rate_out,
        link_in=links.rate_in,
        interconnect=base.interconnect,
        network=base.network,
        launch=links.launch,
        kernel_latency=links.kernel_latency,
        copy_latency=links.copy_latency,
        collective_latency=base.collective_latency,
        efficiency={"collective": base.efficiency.get("collective", 1.0), **(found.efficiency if found else {})},
        reserve=base.reserve,
    )


def measure_more(
    found: Device,
    device: torch.device,
    kernels: Iterable[KernelWork],
    *,
    seconds: float = 60.0,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Calibration:
    """Measure further kernels on the device that :func:`calibrate` found; what it has measured already stays.

    ``device = measure_more(Device.load("h100.json"), torch.device("cuda"), kernels_of(trace)).device``
    """
    work = [one for one in _distinct(kernels) if one.key not in found.measured]
    with torch.no_grad(), _random_restored(device):
        samples, failed = _measure(work, device, watch_for(device), seconds, progress)
    measured = {key: sample.seconds for key, sample in samples.items()}
    return Calibration(replace(found, measured={**found.measured, **measured}), len(measured), failed)


def _notes(device: torch.device, like: Device | None, kernels: int, missing: set[str]) -> tuple[str, ...]:
    notes = [
        f"measured on {device_name(device)} with torch {torch.__version__}, {kernels} kernels",
        "interconnect, network and collectives were not measured: "
        + (f"they are those of {like.name}" if like is not None else "the figures are placeholders"),
    ]
    if device.type == "cpu":
        threads = torch.get_num_threads()
        notes.append(f"{threads} threads" if threads > 1 else "1 thread, by its own clock")
    if missing:
        notes.append(f"kinds that cannot be run alone, which are estimated: {', '.join(sorted(missing))}")
    return tuple(notes)


def _random_restored(device: torch.device) -> AbstractContextManager[None]:
    """Restore the random generators afterwards: measuring must not change a training run."""
    if device.type == "cpu":
        return torch.random.fork_rng([])
    return torch.random.fork_rng(range(torch.accelerator.device_count()), device_type=device.type)


def _distinct(kernels: Iterable[KernelWork]) -> Iterator[_Work]:
    seen = set()
    for one in kernels:
        if one.ranks or is_free(one.kind) or (key := fingerprint(one)) in seen:
            continue
        seen.add(key)
        yield _Work(one.kind, one.dtype, one.shape, one.flops, one.touched)


def _standard() -> Iterator[_Work]:
    for kind, dtype, shape, growth in standard_kernels():
        args, kwargs = read_shape(shape)
        yield _Work(kind, dtype, shape, kernel_flops(kind, args, kwargs, None), growth=growth)


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
    lasted: dict[tuple[str, str], float] = {}
    group: dict[str, tuple[_Work, Callable[[], Any]]] = {}
    held = 0

    def finish(done: int) -> None:
        share = seconds * len(group) / max(1, len(work))
        found = settled_seconds([call for _, call in group.values()], watch, rounds=ROUNDS, seconds=share)
        for (key, (one, _)), value in zip(group.items(), found, strict=True):
            samples[key] = Sample(one.kind, one.dtype, one.flops, one.touched, value)
        group.clear()
        progress("kernels", done, len(work))

    for number, one in enumerate(work):
        if one.growth:
            expected = lasted.get((one.kind, one.dtype), 0.0) * one.growth
            if expected > LONGEST_CALL[kernel_class(one.kind)]:
                lasted[one.kind, one.dtype] = expected
                continue
        try:
            call = rerun(one.kind, one.shape, device)
            touched, lasted[one.kind, one.dtype] = _once(one, call, device)
        except Exception as error:  # whatever it is, the others can be measured
            failed[one.key] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        group[one.key] = one._replace(touched=one.touched or touched), call
        held += _held(one.shape)
        if held > TOGETHER:
            finish(number + 1)
            held = 0
    finish(len(work))
    return samples, failed


def _once(work: _Work, call: Callable[[], Any], device: torch.device) -> tuple[int, float]:
    """The bytes that a call touches, and its seconds of the clock.

    The first call also loads and compiles: it is run a second time if it was long.
    """
    took = float("inf")
    for _ in range(2):
        begin = time.perf_counter()
        result = call()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        took = min(took, time.perf_counter() - begin)
        if took < min(LONGEST_CALL.values()):
            break
    return _touched(work, result), took


def _touched(work: _Work, result: Any) -> int:
    """Bytes that a kernel reads and writes: arguments, results, and what it changes in place both ways."""
    args, kwargs = read_shape(work.shape)
    results = [result] if isinstance(result, Tensor) else list(result or ())
    read = sum(_bytes(one) for one in _flat([*args, *kwargs.values()]) if isinstance(one, TensorShape))
    if work.kind.endswith("_"):
        return read + sum(_bytes(one) for one in _flat(args[:1]))
    return read + sum(one.numel() * one.element_size() for one in _flat(results) if isinstance(one, Tensor))


def _bytes(one: TensorShape) -> int:
    """Bytes of its elements, those that an expansion shows several times counted once."""
    elements = (size for size, stride in zip(one.shape, one.strides, strict=True) if stride or not size)
    return prod(elements) * ITEM.get(one.dtype, 1)


def _held(shape: str) -> int:
    args, kwargs = read_shape(shape)
    return sum(one.bytes for one in _flat([*args, *kwargs.values()]) if isinstance(one, TensorShape))


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list):
            yield from _flat(value)
        else:
            yield value


def device_name(device: torch.device) -> str:
    """What a device is called."""
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


def _reserve(device: torch.device, like: Device | None) -> Reserve:
    """What is not for tensors: the driver's part is what is neither free nor torch's now, after so many kernels."""
    base = like or unknown_device(device)
    if device.type == "cpu":
        return base.reserve
    free, total = torch.accelerator.get_memory_info(device)
    taken = int(total) - int(free) - torch.accelerator.memory_reserved(device)
    return replace(base.reserve, driver=max(0, taken))


def _host_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on every system
        return 1 << 36


def unknown_device(device: torch.device) -> Device:
    """What is assumed of a device before anything is measured."""
    return Device(
        name=device.type, capacity=1, flops={"float32": 1e12}, memory_bandwidth=1e11, link_out=1e10, link_in=1e10,
        interconnect=1e10, network=1e10,
    )  # fmt: skip

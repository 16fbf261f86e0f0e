"""Machines: what a device can do per second.

Nominal figures of data sheets, rounded. They are a scale to compare programs on, not a
promise about any card.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A machine. Rates are per second, times in nanoseconds, sizes in bytes; all are integers."""

    name: str
    capacity: int
    """Device memory."""
    flops_fp64: int
    flops_fp32: int
    flops_half: int
    """bfloat16 and float16."""
    flops_fp8: int
    memory_bandwidth: int
    host_to_device_bandwidth: int
    device_to_host_bandwidth: int
    fabric_bandwidth: int
    """To the other devices of its node, each way."""
    network_bandwidth: int = 50 * 10**9
    """To devices of other nodes, each way; used where ``devices_per_node`` is set."""
    launch: int = 5_000
    """Host time to issue one operator."""
    kernel_latency: int = 2_000
    """Device time of an empty kernel."""
    copy_latency: int = 8_000
    """Link time of an empty copy."""
    fabric_latency: int = 15_000
    """Time of one step of an empty collective."""


TERA, GIGA, GIB = 10**12, 10**9, 2**30

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            name="h100",
            capacity=80 * GIB,
            flops_fp64=67 * TERA,
            flops_fp32=67 * TERA,
            flops_half=989 * TERA,
            flops_fp8=1979 * TERA,
            memory_bandwidth=3350 * GIGA,
            host_to_device_bandwidth=55 * GIGA,
            device_to_host_bandwidth=55 * GIGA,
            fabric_bandwidth=450 * GIGA,
        ),
        Preset(
            name="a100",
            capacity=80 * GIB,
            flops_fp64=19_500 * GIGA,
            flops_fp32=19_500 * GIGA,
            flops_half=312 * TERA,
            flops_fp8=312 * TERA,
            memory_bandwidth=2039 * GIGA,
            host_to_device_bandwidth=25 * GIGA,
            device_to_host_bandwidth=25 * GIGA,
            fabric_bandwidth=300 * GIGA,
        ),
        Preset(
            name="910b",
            capacity=64 * GIB,
            flops_fp64=20 * TERA,
            flops_fp32=78 * TERA,
            flops_half=313 * TERA,
            flops_fp8=313 * TERA,
            memory_bandwidth=1600 * GIGA,
            host_to_device_bandwidth=25 * GIGA,
            device_to_host_bandwidth=25 * GIGA,
            fabric_bandwidth=196 * GIGA,
            launch=8_000,
            kernel_latency=4_000,
        ),
    )
}
PRESETS["ascend_910b"] = PRESETS["910b"]


def preset(name: str | Preset) -> Preset:
    """The preset of that name.

    >>> preset("h100").capacity // 2**30
    80
    """
    if isinstance(name, Preset):
        return name
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}; there are {', '.join(sorted(PRESETS))}")
    return PRESETS[name]


def scaled(base: str | Preset, factor: float | Fraction) -> Preset:
    """A machine on which a model `factor` times as wide and long takes the times of the full one.

    With width, sequence, heads and vocabulary all times f, matrix products shrink with f^3 and
    bytes with f^2. Compute times f^3 and every bandwidth and the capacity times f^2 leave all
    durations, and so all proportions of compute, memory, link and launch, as at full size.

    >>> scaled("h100", 1 / 8).capacity == 80 * 2**30 // 64
    True
    """
    machine = preset(base)
    f = Fraction(factor).limit_denominator(10**6)
    if f <= 0:
        raise ValueError(f"the factor must be positive, not {factor}")

    def times(value: int, power: int) -> int:
        return max(1, int(value * f**power))

    return replace(
        machine,
        name=f"{machine.name} x {f}",
        capacity=times(machine.capacity, 2),
        flops_fp64=times(machine.flops_fp64, 3),
        flops_fp32=times(machine.flops_fp32, 3),
        flops_half=times(machine.flops_half, 3),
        flops_fp8=times(machine.flops_fp8, 3),
        memory_bandwidth=times(machine.memory_bandwidth, 2),
        host_to_device_bandwidth=times(machine.host_to_device_bandwidth, 2),
        device_to_host_bandwidth=times(machine.device_to_host_bandwidth, 2),
        fabric_bandwidth=times(machine.fabric_bandwidth, 2),
        network_bandwidth=times(machine.network_bandwidth, 2),
    )

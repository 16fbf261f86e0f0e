"""Put the known devices into ``docs/devices.md``: ``python docs/make_devices.py``.

A test fails if the page is out of date.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from lowtide.cost.device import Device
from lowtide.cost.devices import DEVICES
from lowtide.units import format_bytes

PAGE = Path(__file__).parent / "devices.md"
BLOCK = re.compile(r"(<!-- (figures|reserve) -->\n).*?(<!-- end -->)", re.DOTALL)


def _rate(rate: float) -> str:
    return f"{rate / 1e9:,.4g}" if rate < 1e12 else f"{rate / 1e9:,.0f}"


def _figures(device: Device) -> list[str]:
    shared = f", for {device.link_sharing}" if device.link_sharing > 1 else ""
    return [
        f"`{device.name}`",
        format_bytes(device.capacity),
        f"{device.flops['bfloat16'] / 1e12:,.4g}",
        _rate(device.memory_bandwidth),
        _rate(device.link_out) + shared,
        _rate(device.host_bandwidth),
        _rate(device.interconnect),
        _rate(device.network),
        str(device.devices_per_node),
        device.source,
    ]


def _reserve(device: Device) -> list[str]:
    reserve = device.reserve
    sizes = (reserve.driver, reserve.workspace, reserve.communication, reserve.all_to_all)
    return [f"`{device.name}`", *map(format_bytes, sizes)]


TABLES: dict[str, tuple[tuple[str, ...], Callable[[Device], list[str]]]] = {
    "figures": (
        ("name", "memory", "bf16 TFLOPS", "memory GB/s", "link to the host", "host's memory", "to its node's devices",
         "to other nodes", "node", "figures from"),
        _figures,
    ),
    "reserve": (("name", "driver", "workspaces", "each process group", "one with all-to-alls"), _reserve),
}  # fmt: skip


def _table(name: str) -> Iterator[str]:
    titles, row = TABLES[name]
    yield f"| {' | '.join(titles)} |"
    yield "|---" * len(titles) + "|"
    for device in DEVICES.values():
        yield f"| {' | '.join(row(device))} |"


def rendered() -> str:
    """The page with the devices as they are now."""
    page = PAGE.read_text(encoding="utf-8")
    return BLOCK.sub(lambda found: found[1] + "\n".join(_table(found[2])) + "\n" + found[3], page)


if __name__ == "__main__":
    PAGE.write_text(rendered(), encoding="utf-8")

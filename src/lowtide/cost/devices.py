"""The devices that a plan can be made for without having one.

Nominal figures of data sheets, dense (no sparsity), rounded; a device's ``source`` names them. Its memory is what torch
reports of such a device, as users' error messages show it. What kernels reach is in the efficiency factors, which are
assumptions and are said to be so in a device's notes, and so are the host and the network: those of a usual server with
such devices. ``lowtide calibrate`` replaces what it can by measurements.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from lowtide.cost.device import MIB, Device, Reserve
from lowtide.errors import PlanError

__all__ = ["DEVICES", "EFFICIENCY", "device_by_product", "find_device", "is_torch_device"]

TERA, GIGA, GIB = 1e12, 1e9, 2**30

EFFICIENCY = {
    # Assumption: large bf16 products of a transformer; published GEMM sweeps lie between 0.6 and 0.85 of the peak.
    "matmul": 0.70,
    # Assumption: flash kernels of head width 128, forward and backward together; backward alone is lower.
    "attention": 0.50,
    # Assumption: streaming kernels of several MiB; published STREAM-like figures lie between 0.75 and 0.92.
    "memory": 0.80,
    # Assumption: pinned copies of several MiB over PCIe, headers and flow control deducted.
    "link_out": 0.85,
    "link_in": 0.85,
    # Assumption: bus bandwidth of large collectives against the sum of the links.
    "collective": 0.75,
}
"""The share of the peak that is assumed where nothing was measured."""

_ASSUMED = (
    "nominal figures of the data sheet",
    "efficiency factors are assumptions; `lowtide calibrate` measures them",
    "what the driver, process groups and workspaces take of the memory is an assumption",
    "the host's memory, its bandwidth and how many devices share a link to it are those of a usual server: assumptions",
)


# What is known of the reserves; the rest is an assumption.
#
# driver: of an H100, 1.06 GB were not torch's before a first all-to-all (NVIDIA/nccl issue 1685). A process that had
#   done little was seen to hold 612 MiB of an H200 and 470 MiB of an RTX 4090; of an Ascend 910B 0.55 to 0.9 GiB were
#   neither free nor torch's.
# communication: a group of four A100s with NVLink took 688 MiB, of two 544 MiB (NVIDIA/nccl issue 964). HCCL takes
#   twice HCCL_BUFFSIZE, which is 200 MB, for each group (CANN's reference of environment variables).
# all_to_all: 3.28 GB more on each of eight H100s after it, with 32 channels to each of the others (issue 1685).
# workspace: torch has one for each cuBLAS handle and stream, so one for forward and one for backward: 32 MiB on Hopper
#   and Blackwell, 8.125 MiB on others, 128 MiB on gfx942 and gfx950 (ATen/cuda/CublasHandlePool.cpp).
#
# Over PCIe, NCCL has fewer channels, and its memory follows them (NVIDIA/nccl issue 986): how much is an assumption.
_NVIDIA = Reserve()
_AMPERE = Reserve(workspace=2 * 8320 * 1024)
_ADA = Reserve(driver=500 * MIB, communication=256 * MIB, all_to_all=512 * MIB, workspace=2 * 8320 * 1024)
_GEFORCE_BLACKWELL = replace(_ADA, workspace=2 * 32 * MIB)
_INSTINCT = Reserve(workspace=2 * 128 * MIB)
_HCCL = Reserve(driver=900 * MIB, communication=400 * 10**6, all_to_all=400 * 10**6)
_HOST = Reserve(driver=4096 * MIB, communication=0, all_to_all=0, workspace=0)


def _device(name: str, *notes: str, **figures: Any) -> Device:
    return Device(name=name, efficiency=EFFICIENCY, notes=(*_ASSUMED, *notes), **{**_USUAL, **figures})


def _rates(half: float, single: float, double: float, eighth: float | None = None) -> dict[str, float]:
    """Rates by dtype, of tera-operations."""
    rates = {"bfloat16": half, "float16": half, "float32": single, "float64": double}
    if eighth is not None:
        rates |= {"float8_e4m3fn": eighth, "float8_e5m2": eighth}
    return {dtype: rate * TERA for dtype, rate in rates.items()}


_USUAL: dict[str, Any] = {
    "link_out": 64 * GIGA,  # PCIe 5 x16
    "link_in": 64 * GIGA,
    "network": 50 * GIGA,  # one 400 Gb/s port for each device
    "host_memory": 2048 * GIB,
    "host_bandwidth": 614.4 * GIGA,  # two sockets with eight channels of DDR5-4800
    "reserve": _NVIDIA,
}
_AMPERE_NODE: dict[str, Any] = {
    "flops": _rates(312, 19.5, 19.5),
    "link_out": 32 * GIGA,  # PCIe 4 x16
    "link_in": 32 * GIGA,
    "interconnect": 300 * GIGA,  # NVLink 3
    "network": 25 * GIGA,
    "link_sharing": 2,  # a PCIe switch for two, as in a DGX A100
    "host_memory": 1024 * GIB,
    "host_bandwidth": 409.6 * GIGA,  # two sockets with eight channels of DDR4-3200
    "reserve": _AMPERE,
    "source": "NVIDIA A100 Tensor Core GPU data sheet",
}
_HOPPER: dict[str, Any] = {
    "flops": _rates(989, 67, 67, 1979),
    "interconnect": 450 * GIGA,  # NVLink 4
}
_GEFORCE: dict[str, Any] = {
    "network": 12.5 * GIGA,  # one 100 Gb/s port for each device
    "devices_per_node": 4,
    "host_memory": 512 * GIB,
    "host_bandwidth": 307.2 * GIGA,  # one socket with eight channels of DDR5-4800
}
_ASCEND: dict[str, Any] = {
    "capacity": int(60.97 * GIB),
    "memory_bandwidth": 1600 * GIGA,
    "link_out": 32 * GIGA,  # PCIe 4 x16
    "link_in": 32 * GIGA,
    "interconnect": 196 * GIGA,  # HCCS, seven links; the same of a 910C's die
    "network": 25 * GIGA,  # one 200 Gb/s port for each device
    "host_memory": 1536 * GIB,
    "host_bandwidth": 750.8 * GIGA,  # four sockets with eight channels of DDR4-2933
    "launch": 8e-6,
    "kernel_latency": 4e-6,
    "reserve": _HCCL,
}

DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _device(
            "a100",
            "SXM, 80 GB; float32 without TF32",
            capacity=int(79.15 * GIB),
            memory_bandwidth=2039 * GIGA,
            **_AMPERE_NODE,
        ),
        _device(
            "a100-40",
            "SXM, 40 GB; float32 without TF32",
            capacity=int(39.39 * GIB),
            memory_bandwidth=1555 * GIGA,
            **_AMPERE_NODE,
        ),
        _device(
            "h100",
            "SXM, 80 GB; float32 without TF32",
            capacity=int(79.10 * GIB),
            memory_bandwidth=3350 * GIGA,
            source="NVIDIA H100 Tensor Core GPU data sheet",
            **_HOPPER,
        ),
        _device(
            "h200",
            "SXM, 141 GB; float32 without TF32",
            capacity=int(139.80 * GIB),
            memory_bandwidth=4800 * GIGA,
            source="NVIDIA H200 Tensor Core GPU data sheet",
            **_HOPPER,
        ),
        _device(
            "b200",
            "180 GB, as in an eight-device node; float32 without TF32",
            capacity=int(178.35 * GIB),
            flops=_rates(2250, 75, 37, 4500),
            memory_bandwidth=7700 * GIGA,
            interconnect=900 * GIGA,  # NVLink 5
            host_bandwidth=716.8 * GIGA,  # two sockets with eight channels of DDR5-5600
            source="NVIDIA HGX B200 data sheet",
        ),
        _device(
            "gb200",
            "186 GB; a node is a rack of 72; float32 without TF32",
            "each Grace has 480 GB; its NVLink-C2C of 450 GB/s each way is taken to be shared by its two devices",
            capacity=int(184.31 * GIB),
            flops=_rates(2500, 80, 40, 5000),
            memory_bandwidth=8000 * GIGA,
            link_out=450 * GIGA,  # NVLink-C2C
            link_in=450 * GIGA,
            interconnect=900 * GIGA,  # NVLink 5
            link_sharing=2,
            devices_per_node=72,
            host_memory=36 * 480 * 10**9,
            host_bandwidth=36 * 512 * GIGA,
            source="NVIDIA GB200 NVL72 data sheet",
        ),
        _device(
            "l40s",
            "48 GB; no NVLink; float32 without TF32",
            capacity=int(44.39 * GIB),
            flops=_rates(362, 91.6, 1.4, 733),
            memory_bandwidth=864 * GIGA,
            link_out=32 * GIGA,  # PCIe 4 x16
            link_in=32 * GIGA,
            interconnect=32 * GIGA,
            link_sharing=2,
            network=25 * GIGA,
            host_memory=1024 * GIB,
            reserve=_ADA,
            source="NVIDIA L40S data sheet",
        ),
        _device(
            "rtx4090",
            "24 GB; no NVLink; sums of products in float32",
            capacity=int(23.64 * GIB),
            flops=_rates(165.2, 82.6, 1.29, 330.3),
            memory_bandwidth=1008 * GIGA,
            link_out=32 * GIGA,  # PCIe 4 x16
            link_in=32 * GIGA,
            interconnect=32 * GIGA,
            reserve=_ADA,
            source="NVIDIA Ada GPU Architecture white paper",
            **_GEFORCE,
        ),
        _device(
            "rtx5090",
            "32 GB; no NVLink; sums of products in float32",
            capacity=int(31.36 * GIB),
            flops=_rates(209.5, 104.8, 1.64, 419),
            memory_bandwidth=1792 * GIGA,
            interconnect=64 * GIGA,
            reserve=_GEFORCE_BLACKWELL,
            source="NVIDIA RTX Blackwell GPU Architecture white paper",
            **_GEFORCE,
        ),
        _device(
            "mi300x",
            "192 GB",
            capacity=int(191.69 * GIB),
            flops=_rates(1307, 163, 163, 2615),
            memory_bandwidth=5300 * GIGA,
            interconnect=448 * GIGA,  # seven Infinity Fabric links
            host_bandwidth=921.6 * GIGA,  # two sockets with twelve channels of DDR5-4800
            reserve=_INSTINCT,
            source="AMD Instinct MI300X accelerator data sheet",
        ),
        _device(
            "mi355x",
            "288 GB",
            capacity=int(287.98 * GIB),
            flops=_rates(2516, 157, 78.6, 5033),
            memory_bandwidth=8000 * GIGA,
            interconnect=537.6 * GIGA,  # seven Infinity Fabric links
            host_memory=3072 * GIB,
            host_bandwidth=1152 * GIGA,  # two sockets with twelve channels of DDR5-6000
            reserve=_INSTINCT,
            source="AMD Instinct MI355X GPU data sheet; AMD CDNA 4 architecture white paper",
        ),
        _device(
            "910b",
            "64 GB; the lower of the clock rates that are sold",
            flops=_rates(313, 78, 20),
            source="Huawei's figures of the Atlas 800T A2",
            **_ASCEND,
        ),
        _device(
            "910c",
            "one of the two dies of a package, which is what programs see as a device; 16 to a node",
            "a node's devices are taken as a node, also where a larger fabric joins several",
            flops=_rates(376, 94, 24),
            devices_per_node=16,
            source="Huawei's paper on CloudMatrix384 (arXiv 2506.12708)",
            **_ASCEND,
        ),
        _device(
            "gaudi",
            "Gaudi 3, 128 GB; 21 of its 24 ports of 200 Gb/s go to the devices of its node, 3 to others",
            capacity=128 * GIB,
            flops=_rates(1835, 229, 229, 1835),
            memory_bandwidth=3700 * GIGA,
            interconnect=525 * GIGA,
            network=75 * GIGA,
            source="Intel Gaudi 3 AI accelerator white paper",
        ),
        _device(
            "cpu",
            "a server's socket of about 32 cores, an assumption; swapping there is a copy from memory to memory",
            "4 GiB are left to the system",
            capacity=256 * GIB,
            flops=_rates(4, 2, 1),
            memory_bandwidth=200 * GIGA,
            link_out=20 * GIGA,
            link_in=20 * GIGA,
            interconnect=20 * GIGA,
            network=12.5 * GIGA,
            launch=0.0,  # who issues a kernel also runs it
            kernel_latency=5e-6,
            copy_latency=5e-6,
            collective_latency=30e-6,
            devices_per_node=2,
            host_memory=512 * GIB,
            host_bandwidth=400 * GIGA,
            reserve=_HOST,
            source="no data sheet: assumed",
        ),
    )
}
"""The devices by name."""


def find_device(name: str | Path) -> Device:
    """The device of a name, or of a file that ``lowtide calibrate`` wrote; PlanError if there is none.

    >>> find_device("h100").capacity // 2**30
    79
    """
    text = str(name)
    if (found := DEVICES.get(text.lower())) is not None:
        return found
    if text.endswith(".json") or Path(text).is_file():
        return Device.load(text)
    if is_torch_device(text):
        raise PlanError(
            f"{text!r} says which backend, not which device: give one of {', '.join(DEVICES)}, or the file that"
            " `lowtide calibrate` wrote on it"
        )
    close = difflib.get_close_matches(text.lower(), DEVICES, n=2, cutoff=0.4)
    meant = f"did you mean {' or '.join(close)}? There are" if close else "there are"
    raise PlanError(
        f"no device {text!r}: {meant} {', '.join(DEVICES)};"
        " for another one give the file that `lowtide calibrate` wrote on it"
    )


_BACKENDS = ("cuda", "hip", "hpu", "mps", "npu", "xpu")


def is_torch_device(name: str) -> bool:
    """Whether a name is torch's for an accelerator, which says nothing of its speed.

    >>> is_torch_device("cuda:0"), is_torch_device("h100"), is_torch_device("cpu")
    (True, False, False)
    """
    return re.fullmatch(rf"(?:{'|'.join(_BACKENDS)})(?::\d+)?", name) is not None


_PRODUCTS = {
    "a100": r"a100(?!\d)(?!\S*-40gb)",
    "a100-40": r"a100\S*-40gb",
    "rtx4090": r"rtx 4090(?! d\b| laptop)",
    "rtx5090": r"rtx 5090(?! d\b| laptop)",
    "gaudi": r"gaudi|hl-3\d\d",
    "910c": r"910_?93|910c",
    "910b": r"910b",
}
"""How a driver names a device, where it is not as the table does."""


def device_by_product(product: str) -> Device | None:
    """The device that a driver calls so; None if the table does not have it.

    >>> device_by_product("NVIDIA H100 80GB HBM3").name
    'h100'
    """
    text = product.lower()
    for name, device in DEVICES.items():
        written = _PRODUCTS.get(name, rf"{name}(?!\d)")
        if name != "cpu" and re.search(rf"(?<![a-z0-9])(?:ascend)?(?:{written})", text):
            return device
    return None

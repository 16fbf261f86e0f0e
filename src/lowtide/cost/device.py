"""A device, as far as a plan needs to know it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lowtide.errors import PlanError

__all__ = ["Device", "Reserve"]

FORMAT = 1
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Reserve:
    """Bytes of a device's memory that are not for tensors. The defaults are assumptions, for a device of which nothing
    else is known: those of an NVIDIA device with NVLink."""

    driver: int = 1024 * MIB
    """The driver's context of a process, with the kernels that it loads."""
    communication: int = 688 * MIB
    """Buffers of a process group: each has its own."""
    all_to_all: int = 3128 * MIB
    """The same for a group that has all-to-alls, whose ranks are all connected to each other."""
    workspace: int = 64 * MIB
    """Workspaces of matrix products: one for each thread and stream that has any."""

    def total(self, groups: int = 0, all_to_all: int = 0) -> int:
        """All of it in a run with so many process groups, of which so many have all-to-alls.

        >>> Reserve(driver=500, communication=40, all_to_all=300, workspace=8).total(3, 1)
        888
        """
        connected = all_to_all * self.all_to_all
        return self.driver + self.workspace + (groups - all_to_all) * self.communication + connected


@dataclass(frozen=True, kw_only=True)
class Device:
    """What a device does per second. Rates are bytes or operations per second, times are seconds."""

    name: str
    """What it is called: ``h100``."""
    capacity: int
    """Its memory in bytes, as torch reports it: less than the data sheet's, by what the system keeps to itself."""
    flops: Mapping[str, float]
    """Floating-point operations per second of matrix products, by dtype: ``bfloat16``, ``float32``."""
    memory_bandwidth: float
    """Of its own memory."""
    link_out: float
    """To the host's memory."""
    link_in: float
    """From the host's memory."""
    interconnect: float
    """To the other devices of its node, each way."""
    network: float
    """To devices of other nodes, each way, for one device."""
    launch: float = 5e-6
    """Host time to issue a kernel."""
    kernel_latency: float = 2e-6
    """Device time of an empty kernel."""
    copy_latency: float = 8e-6
    """Link time of an empty copy."""
    collective_latency: float = 15e-6
    """Time of one step of an empty collective."""
    devices_per_node: int = 8
    host_memory: int = 1 << 40
    """Memory of a node's host in bytes, which its devices share."""
    host_bandwidth: float = 0.0
    """Of that memory, which the devices share too; 0 where it is not known, and then it is no limit."""
    link_sharing: int = 1
    """How many devices share one link to the host, as those of a PCIe switch do."""
    reserve: Reserve = field(default_factory=Reserve)
    """What of its memory is not for tensors."""
    expandable_segments: bool = False
    """Whether torch's allocator is set to ``expandable_segments:True`` on it."""
    efficiency: Mapping[str, float] = field(default_factory=dict)
    """The share of the peak that kernels reach, by kind (``aten::mm``) or by class: ``matmul``, ``attention``,
    ``memory``, ``link_out``, ``link_in``, ``collective``. What is missing is 1. A kind with FLOPs may have another
    share of the memory's peak: ``aten::mm|memory``."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """Measured seconds of kernels, by ``kind|dtype|shape``."""
    notes: tuple[str, ...] = ()
    """What was assumed or measured."""
    source: str = ""
    """The document that the nominal figures are from."""

    @property
    def budget(self) -> int:
        """The memory that a run of one process may reserve unless its user says otherwise. Process groups leave less:
        see :func:`lowtide.planner.budget.budget_of`."""
        return max(0, self.capacity - self.reserve.total())

    def in_run(self, ranks: int) -> Device:
        """The device in a run of so many ranks, with the rates to and from the host that it has while the others of its
        node copy as much at the same time: the smaller of its share of the link and of the host's memory.

        >>> device = Device(name="", capacity=1, flops={}, memory_bandwidth=1.0, link_out=32.0, link_in=32.0,
        ...     interconnect=1.0, network=1.0, devices_per_node=8, link_sharing=2, host_bandwidth=100.0)
        >>> [device.in_run(ranks).link_out for ranks in (1, 2, 8)]
        [32.0, 16.0, 12.5]
        """
        if self.link_sharing == 1 and not self.host_bandwidth:
            return self
        here = min(ranks, self.devices_per_node)
        share = min(here, self.link_sharing)
        most = self.host_bandwidth / here if self.host_bandwidth else math.inf
        return replace(
            self,
            link_out=min(self.link_out / share, most),
            link_in=min(self.link_in / share, most),
            host_bandwidth=0.0,
            link_sharing=1,
        )

    def as_json(self) -> dict[str, Any]:
        """The device as plain JSON values."""
        return {"lowtide_device": FORMAT, **asdict(self)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Device:
        """The reverse of :meth:`as_json`; PlanError where it is something else."""
        if not isinstance(value, Mapping) or value.get("lowtide_device") != FORMAT:
            raise PlanError(f'not a device: expected an object with "lowtide_device": {FORMAT}')
        known = {one.name for one in fields(Device)}
        given = {key: item for key, item in value.items() if key != "lowtide_device"}
        if unknown := set(given) - known:
            raise PlanError(f"a device has {', '.join(sorted(known))}; found also {', '.join(sorted(unknown))}")
        try:
            reserve = Reserve(**given.get("reserve", {}))  # files from before have none
            return Device(**{**given, "notes": tuple(given.get("notes", ())), "reserve": reserve})
        except TypeError as error:
            raise PlanError(f"not a device: {error}") from None

    def save(self, file: str | Path) -> None:
        """Write the device into a file."""
        Path(file).write_text(json.dumps(self.as_json(), indent=1) + "\n")

    @staticmethod
    def load(file: str | Path) -> Device:
        """Read what :meth:`save` wrote."""
        try:
            value = json.loads(Path(file).read_text())
        except OSError as error:
            raise PlanError(f"{file}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise PlanError(f"{file} is not a device: {error}") from None
        try:
            return Device.from_json(value)
        except PlanError as error:
            raise PlanError(f"{file}: {error}") from None

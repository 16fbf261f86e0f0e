"""The device of this machine, looked up in the table of known ones."""

from __future__ import annotations

from dataclasses import replace

import torch

from lowtide.cost.calibrate import device_name
from lowtide.cost.device import Device
from lowtide.cost.devices import DEVICES, device_by_product
from lowtide.errors import PlanError

__all__ = ["present_device"]


def present_device(device: torch.device | str) -> Device:
    """The known device that torch calls ``cuda``, ``xpu:0`` or ``npu`` here, with the memory that it really has.

    PlanError if there is none on this machine, or one that the table does not have: its figures have to be measured.
    """
    where = torch.device(device)
    if where.type == "cpu":
        return DEVICES["cpu"]
    instead = f"give one of {', '.join(DEVICES)}, or the file that `lowtide calibrate` wrote on the device"
    present = torch.accelerator.current_accelerator(check_available=True)
    if present is None or present.type != where.type:
        raise PlanError(f"device={str(where)!r} means the one of this machine, which has none: {instead}")
    name = device_name(where)
    known = device_by_product(name)
    if known is None:
        raise PlanError(f"device={str(where)!r} is {name!r} here, which is not a known device: {instead}")
    return replace(known, capacity=int(torch.accelerator.get_memory_info(where)[1]))

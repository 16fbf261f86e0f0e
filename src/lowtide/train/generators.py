"""The random generators of a process, taken as one tensor and set back bit by bit."""

from __future__ import annotations

import io
import random
import sys
from typing import Any

import torch
from torch import Tensor

__all__ = ["capture", "reseed", "restore"]


def capture() -> Tensor:
    """The state of this process's generators (torch on the CPU and the device, Python, numpy) as bytes in a tensor."""
    states: dict[str, Any] = {"cpu": torch.get_rng_state(), "python": random.getstate()}
    if (device := _device_module()) is not None:
        states["device"] = device.get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = (kind, keys.tolist(), *rest)
    buffer = io.BytesIO()
    torch.save(states, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def restore(captured: Tensor) -> None:
    """Restore the generators. One that this process does not have is left out."""
    states = torch.load(io.BytesIO(captured.cpu().numpy().tobytes()), weights_only=True)
    torch.set_rng_state(states["cpu"])
    random.setstate(states["python"])
    if "device" in states and (device := _device_module()) is not None:
        device.set_rng_state(states["device"])
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(states["numpy"])


def reseed(seed: int) -> None:
    """Reseed all generators from one seed."""
    torch.manual_seed(seed)  # the device's too
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % (1 << 32))


def _device_module() -> Any:
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else torch.get_device_module(accelerator)

"""The random generators of a process, captured as one tensor and restored bit by bit."""

from __future__ import annotations

import io
import random
import sys
from typing import Any

import torch
from torch import Tensor

from lowtide.runtime.randomness import HostRandom, default_generators

__all__ = ["capture", "reseed", "restore"]


def capture() -> Tensor:
    """The random state of this process (torch on the host and the device, Python, numpy) as bytes in a tensor."""
    host = HostRandom()
    states = {
        "torch": [one.get_state() for one in default_generators()],
        "python": host.python,
        "numpy": None if host.numpy is None else _plain(host.numpy),
    }
    buffer = io.BytesIO()
    torch.save(states, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def restore(captured: Tensor) -> None:
    """Set the generators back. One that this process does not have is left out."""
    states = torch.load(io.BytesIO(captured.cpu().numpy().tobytes()), weights_only=True)
    for generator, state in zip(default_generators(), states["torch"], strict=False):
        generator.set_state(state)
    random.setstate(states["python"])
    if states["numpy"] is not None and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(states["numpy"])


def reseed(seed: int) -> None:
    """Reseed all generators from one seed."""
    torch.manual_seed(seed)  # the device's too
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % (1 << 32))


def _plain(state: Any) -> Any:
    """A state of numpy's without its arrays, which a checkpoint does not hold."""
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state

"""The random generators, as they were."""

from __future__ import annotations

import random
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Generators", "ProcessGenerators"]


class Generators(NamedTuple):
    """torch's generators and their states."""

    states: tuple[tuple[torch.Generator, Tensor], ...]
    """Those of the host and of the current device, and those that a call was given."""

    @staticmethod
    def now(given: Any = ()) -> Generators:
        """The states as they are; ``given`` may be the arguments of a call, which may name a generator."""
        named = [one for one in given if isinstance(one, torch.Generator)]
        return Generators(tuple((one, one.get_state()) for one in [*_defaults(), *named]))

    def restore(self) -> None:
        """Set them back."""
        for generator, state in self.states:
            generator.set_state(state)


class ProcessGenerators(NamedTuple):
    """All generators that a step may draw from: torch's, Python's and numpy's."""

    torch: Generators
    python: Any
    numpy: Any
    """None if numpy is not in use."""

    @staticmethod
    def now() -> ProcessGenerators:
        numpy = sys.modules.get("numpy")
        return ProcessGenerators(
            Generators.now(), random.getstate(), None if numpy is None else numpy.random.get_state()
        )

    def restore(self) -> None:
        """Set them back."""
        self.torch.restore()
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


def _defaults() -> list[torch.Generator]:
    found = [torch.default_generator]
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        of_devices = getattr(torch.get_device_module(accelerator), "default_generators", ())
        found += of_devices  # empty until a device is first used
    return found

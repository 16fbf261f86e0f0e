"""The random generators, as they were."""

from __future__ import annotations

import random
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.operators.calls import tensors_of

__all__ = ["Generators", "ProcessGenerators"]


class Generators(NamedTuple):
    """torch's generators and their states."""

    states: tuple[tuple[torch.Generator, Tensor], ...]
    """Those of the host and of the devices, and those that a call was given."""

    @staticmethod
    def now(given: Any = None) -> Generators:
        """The states as they are: of all devices, or, where ``given`` are the arguments of a call, of those in it."""
        named = [one for one in given or () if isinstance(one, torch.Generator)]
        return Generators(tuple((one, one.get_state()) for one in [*_defaults(given), *named]))

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


def _defaults(given: Any) -> list[torch.Generator]:
    found = [torch.default_generator]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        of_devices = getattr(torch.get_device_module(accelerator), "default_generators", ())
        if given is None or not of_devices:  # there are none until a device is first used
            return found + list(of_devices)
        devices = [tensor.device for tensor in tensors_of(given)] + [one for one in given if type(one) is torch.device]
        indices = {one.index for one in devices if one.type == accelerator.type and one.index is not None}
        found += [of_devices[index] for index in sorted(indices | {torch.accelerator.current_device_index()})]
    return found

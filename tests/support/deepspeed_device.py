"""The virtual accelerator as a device of DeepSpeed, which knows devices by an interface of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import tide

__all__ = ["BACKEND", "use_device"]

BACKEND = "cpu:gloo,tide:tide"
"""The process group's."""


def use_device(device: str) -> None:
    """Let DeepSpeed train on ``device`` from now on: the CPU, or the virtual accelerator."""
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    set_accelerator(_on_tide(CPU_Accelerator) if device == "tide" else CPU_Accelerator())


def _on_tide(of_cpu: type[Any]) -> Any:
    """DeepSpeed's class for the CPU, with streams, memory and random numbers of the virtual accelerator."""
    on = tide.device

    class Accelerator(of_cpu):  # type: ignore[misc]
        _name = "tide"
        Stream, Event = staticmethod(on.Stream), torch.Event
        ByteTensor, FloatTensor = partial(_tensor, torch.uint8), partial(_tensor, torch.float32)

        def is_synchronized_device(self) -> bool:
            return False

        def use_host_timers(self) -> bool:
            return True

        def device_name(self, device_index: int | None = None) -> str:
            return "tide" if device_index is None else f"tide:{device_index}"

        def current_device_name(self) -> str:
            return f"tide:{on.current_device()}"

        def communication_backend_name(self) -> str:
            return BACKEND

        def on_accelerator(self, tensor: torch.Tensor) -> bool:
            return tensor.device.type == "tide"

        def pin_memory(self, tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
            return tensor.pin_memory()

        def total_memory(self, device_index: int | None = None) -> int:
            return on.mem_get_info(device_index)[1]

        def available_memory(self, device_index: int | None = None) -> int:
            return on.mem_get_info(device_index)[0]

        def default_stream(self, device_index: int | None = None) -> torch.Stream:
            return on.current_stream(device_index)

        def default_generator(self, device_index: int) -> torch.Generator:
            return on.default_generators[device_index]

    for name in (
        "device", "set_device", "current_device", "device_count", "synchronize", "stream", "current_stream",
        "manual_seed", "manual_seed_all", "initial_seed", "get_rng_state", "set_rng_state", "empty_cache",
        "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats",
        "reset_peak_memory_stats",
    ):  # fmt: skip
        setattr(Accelerator, name, staticmethod(getattr(on, name)))
    return Accelerator()


def _tensor(dtype: torch.dtype, values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device="tide")

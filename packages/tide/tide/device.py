"""The module torch knows as `torch.tide`: what generic code asks of a device by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from . import _C

Event = torch.Event
_initialized = True  # torch.utils.checkpoint preserves the random state of such devices only


def _index(device: Any = None) -> int:
    if device is None:
        return _C.current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return _C.current_device() if index is None else index


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return _C.in_forked_child()


def _lazy_init() -> None:
    pass


def device_count() -> int:
    return _C.device_count()


def current_device() -> int:
    return _C.current_device()


def set_device(device: Any) -> None:
    _C.set_device(_index(device))


class device(torch.accelerator.device_index):
    """Selects a device for the duration of a `with` block."""

    def __init__(self, device: Any) -> None:
        super().__init__(_index(device))


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_index(device))


def Stream(device: Any = None, priority: int = 0) -> torch.Stream:
    return torch.Stream(torch.device("tide", _index(device)), priority=priority)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream) -> torch.Stream:
    """`with torch.tide.stream(s):`, as other device modules spell it."""
    return stream


def _generator(device: Any = None) -> torch.Generator:
    return default_generators[_index(device)]


default_generators: tuple[torch.Generator, ...] = ()


def manual_seed(seed: int) -> None:
    _generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


def seed() -> int:
    return _generator().seed()


def initial_seed() -> int:
    return _generator().initial_seed()


def get_rng_state(device: Any = None) -> torch.Tensor:
    return _generator(device).get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    _generator(device).set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [generator.get_state() for generator in default_generators]


def set_rng_state_all(states: Iterable[torch.Tensor]) -> None:
    for generator, state in zip(default_generators, states, strict=True):
        generator.set_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def memory_allocated(device: Any = None) -> int:
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device: Any = None) -> int:
    return torch.accelerator.max_memory_allocated(_index(device))


def memory_reserved(device: Any = None) -> int:
    return torch.accelerator.memory_reserved(_index(device))


def max_memory_reserved(device: Any = None) -> int:
    return torch.accelerator.max_memory_reserved(_index(device))


def memory_stats(device: Any = None) -> dict[str, Any]:
    return torch.accelerator.memory_stats(_index(device))


def reset_peak_memory_stats(device: Any = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return torch.accelerator.get_memory_info(_index(device))


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def get_device_name(device: Any = None) -> str:
    return f"tide ({_C.configuration()['name']})"

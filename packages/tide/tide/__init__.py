"""tide: a virtual accelerator for PyTorch.

Importing it gives torch a device named `tide` with streams, events, pinned memory, a hard
capacity and a clock. Numbers are real (CPU kernels on the same bytes), time is simulated, races are
reported.

>>> import torch, tide
>>> tide.configure(preset="h100", capacity=2 * 2**30)
>>> x = torch.ones(3, device="tide")
>>> (x + x).cpu()
tensor([2., 2., 2.])
"""

from __future__ import annotations

import atexit
import contextlib
import sys
from dataclasses import asdict
from typing import Any

import torch

from . import _C, device, distributed, faults
from .presets import PRESETS, Preset, preset, scaled
from .races import Access, Race, RaceError, check_races, clear_races, races
from .timeline import Timeline, record

__all__ = [
    "PRESETS",
    "Access",
    "Preset",
    "Race",
    "RaceError",
    "Timeline",
    "advance",
    "check_races",
    "clear_races",
    "configuration",
    "configure",
    "faults",
    "idle_at",
    "now",
    "pinned_memory_stats",
    "preset",
    "races",
    "record",
    "reset",
    "scaled",
]

if torch._C._get_privateuse1_backend_name() != "tide":
    torch.utils.rename_privateuse1_backend("tide")
    torch._register_device_module("tide", device)
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
    )
    device.default_generators = tuple(
        _C.default_generator(index) for index in range(_C.device_count())
    )
    distributed.register()

_DEFAULTS: dict[str, Any] = {
    "mode": "virtual",
    "races": True,
    "poison": True,
    "efficiency_seed": 0,
    "pinned_capacity": 64 * 2**30,
    "devices_per_node": 0,
}


def configure(
    *,
    preset: str | Preset | None = None,
    capacity: int | None = None,
    pinned_capacity: int | None = None,
    mode: str | None = None,
    races: bool | None = None,
    poison: bool | None = None,
    efficiency_seed: int | None = None,
    devices_per_node: int | None = None,
    **rates: int,
) -> None:
    """Change the device, once it is idle. What is not named stays; a preset sets all of its values.

    `mode` is "virtual" (kernels run at once on the calling thread) or "async" (a worker thread for
    each stream). `efficiency_seed` other than 0 gives every kind of kernel and every link a hidden
    efficiency. `devices_per_node` puts ranks of neighbouring numbers on nodes with a network
    between them; 0 is one node for all. Any field of `Preset` can be given by name, in its units.

    >>> configure(preset="a100", capacity=40 * 2**30, launch=0)
    """
    values: dict[str, Any] = {}
    if preset is not None:
        values.update(asdict(_preset(preset)))
    if capacity is not None:
        values["capacity"] = int(capacity)
    if pinned_capacity is not None:
        values["pinned_capacity"] = int(pinned_capacity)
    if mode is not None:
        if mode not in ("virtual", "async"):
            raise ValueError(f'mode must be "virtual" or "async", not {mode!r}')
        values["asynchronous"] = mode == "async"
    for name, value in (("races", races), ("poison", poison)):
        if value is not None:
            values[name] = bool(value)
    if efficiency_seed is not None:
        values["efficiency_seed"] = int(efficiency_seed)
    if devices_per_node is not None:
        if devices_per_node < 0:
            raise ValueError(f"devices_per_node must be 0 or more, not {devices_per_node}")
        values["devices_per_node"] = int(devices_per_node)
    known = set(Preset.__dataclass_fields__)
    for name, rate in rates.items():
        if name not in known:
            raise TypeError(f"configure() has no option {name!r}; a preset has {sorted(known)}")
        values[name] = rate
    _C.configure(values)


_preset = preset


def configuration() -> dict[str, Any]:
    """All settings as they are now."""
    return _C.configuration()


def reset() -> None:
    """As after import: default settings, clocks at zero, nothing recorded, no faults, empty caches.

    Live tensors stay valid and stay counted.
    """
    _C.reset()  # waits for the device, and drops errors that nobody has waited for
    _C.on_allocation_failure(None)
    configure(preset="h100", **_DEFAULTS)
    torch.accelerator.empty_cache()
    _C.empty_pinned_cache()
    _C.reset()
    for index in range(_C.device_count()):
        torch.accelerator.reset_peak_memory_stats(index)
        torch.accelerator.reset_accumulated_memory_stats(index)
    _C.reset_pinned_peak()
    device.manual_seed_all(torch.default_generator.initial_seed())


def now() -> int:
    """The host's clock, in nanoseconds."""
    return _C.now()


def advance(nanoseconds: int) -> None:
    """Let the host be busy with something else for a while."""
    _C.advance(int(nanoseconds))


def idle_at(stream: torch.Stream | None = None) -> int:
    """When everything issued to the stream so far will be done, in nanoseconds."""
    stream = stream or torch.accelerator.current_stream()
    return _C.stream_idle_at(stream.device_index, stream.stream_id)


def pinned_memory_stats() -> dict[str, int]:
    """Bytes of pinned host memory: allocated, reserved (with the cache), peak; and allocations."""
    allocated, reserved, peak, allocations = _C.pinned_stats()
    return {
        "allocated": allocated,
        "reserved": reserved,
        "peak": peak,
        "allocations": allocations,
    }


def _settle() -> None:
    # Workers must not run kernels while the libraries under them are taken down.
    with contextlib.suppress(RuntimeError):
        torch.accelerator.synchronize()


atexit.register(_settle)
sys.modules.setdefault("torch.tide", device)

"""What a call runs in besides its arguments: every setting of torch that may choose another kernel or another device.

A replay has to find all of them as the call did. They are listed here and nowhere else. Random states and autocast,
which every replay sets, are in :mod:`lowtide.runtime.randomness` and ``_torch_private``.

[Note: the cost of looking]
A captured call reads what is cheap to read (:func:`ambient`), in about a microsecond. The precisions of matrix products
take several, are set for a whole run as a rule, and are read once for each run of a layer (:func:`precision`) and once
for each backward. Equal settings are one object, so that comparing them is comparing addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import _C

from lowtide._torch_private.backward import current_backward
from lowtide._torch_private.modes import (
    DeviceContext,
    dispatch_modes,
    dispatch_modes_on,
    function_modes,
    function_modes_on,
)

__all__ = ["Ambient", "Precision", "ambient", "precision", "restored"]


class _Setting(NamedTuple):
    """How one setting is read and written."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]


_PRIVATE: Any = _C
_ONE, _SMALLEST = 1.0, 5e-324


def _flushes() -> bool:
    """Whether this thread takes denormal numbers for zero. Torch cannot be asked, but Python's own product can."""
    return _SMALLEST * _ONE == 0.0


_SETTINGS = {
    "deterministic algorithms": _Setting(
        _PRIVATE._get_deterministic_algorithms,
        lambda value: _PRIVATE._set_deterministic_algorithms(
            value, warn_only=_PRIVATE._get_deterministic_algorithms_warn_only()
        ),
    ),
    "deterministic algorithms only warn": _Setting(
        _PRIVATE._get_deterministic_algorithms_warn_only,
        lambda value: _PRIVATE._set_deterministic_algorithms(_PRIVATE._get_deterministic_algorithms(), warn_only=value),
    ),
    "fill uninitialized memory": _Setting(
        _PRIVATE._get_deterministic_fill_uninitialized_memory, _PRIVATE._set_deterministic_fill_uninitialized_memory
    ),
    "default dtype": _Setting(torch.get_default_dtype, torch.set_default_dtype),
    "flush denormal": _Setting(_flushes, torch.set_flush_denormal),
    "flash attention": _Setting(_PRIVATE._get_flash_sdp_enabled, _PRIVATE._set_sdp_use_flash),
    "math attention": _Setting(_PRIVATE._get_math_sdp_enabled, _PRIVATE._set_sdp_use_math),
    "memory-efficient attention": _Setting(
        _PRIVATE._get_mem_efficient_sdp_enabled, _PRIVATE._set_sdp_use_mem_efficient
    ),
    "cuDNN attention": _Setting(_PRIVATE._get_cudnn_sdp_enabled, _PRIVATE._set_sdp_use_cudnn),
    "the device's own attention": _Setting(_PRIVATE._get_overrideable_sdp_enabled, _PRIVATE._set_sdp_use_overrideable),
    "cuDNN": _Setting(_PRIVATE._get_cudnn_enabled, _PRIVATE._set_cudnn_enabled),
    "cuDNN benchmark": _Setting(_PRIVATE._get_cudnn_benchmark, _PRIVATE._set_cudnn_benchmark),
    "cuDNN deterministic": _Setting(_PRIVATE._get_cudnn_deterministic, _PRIVATE._set_cudnn_deterministic),
    "oneDNN": _Setting(_PRIVATE._get_mkldnn_enabled, _PRIVATE._set_mkldnn_enabled),
}
_WRITE = tuple(setting.set for setting in _SETTINGS.values())


def _reader(settings: dict[str, _Setting]) -> Callable[[], tuple[Any, ...]]:
    """Reads all settings, without a loop: see [Note: the cost of looking]."""
    getters = {f"get{number}": setting.get for number, setting in enumerate(settings.values())}
    source = f"lambda: ({', '.join(f'{name}()' for name in getters)},)"
    made: Callable[[], tuple[Any, ...]] = eval(source, dict(getters))
    return made


_read_settings = _reader(_SETTINGS)


def _fp32(backend: str, operator: str) -> _Setting:
    return _Setting(
        partial(_PRIVATE._get_fp32_precision_getter, backend, operator),
        lambda value: _PRIVATE._set_fp32_precision_setter(backend, operator, value),
    )


def _legacy_precision() -> str | None:
    """The setting for all backends; None where they have been set one by one, which torch refuses to sum up."""
    try:
        found: str = _PRIVATE._get_float32_matmul_precision()
    except RuntimeError:
        return None
    return found


def _set_legacy_precision(value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


_PRECISIONS = {
    "float32 products": _Setting(_legacy_precision, _set_legacy_precision),  # first: it sets some of the others
    "float32": _fp32("generic", "all"),
    **{
        f"float32, {backend} {operator}": _fp32(backend, operator)
        for backend in ("cuda", "mkldnn")
        for operator in ("all", "matmul", "conv", "rnn")
    },
    "float16 reductions": _Setting(
        _PRIVATE._get_cublas_allow_fp16_reduced_precision_reduction,
        lambda value: _PRIVATE._set_cublas_allow_fp16_reduced_precision_reduction(*value),
    ),
    "bfloat16 reductions": _Setting(
        _PRIVATE._get_cublas_allow_bf16_reduced_precision_reduction,
        lambda value: _PRIVATE._set_cublas_allow_bf16_reduced_precision_reduction(*value),
    ),
    "float16 accumulation": _Setting(
        _PRIVATE._get_cublas_allow_fp16_accumulation, _PRIVATE._set_cublas_allow_fp16_accumulation
    ),
    "float16 reductions on the host": _Setting(
        _PRIVATE._get_cpu_allow_fp16_reduced_precision_reduction,
        _PRIVATE._set_cpu_allow_fp16_reduced_precision_reduction,
    ),
    "reductions of math attention": _Setting(
        _PRIVATE._get_math_sdp_allow_fp16_bf16_reduction, _PRIVATE._set_math_sdp_allow_fp16_bf16_reduction
    ),
    "order of attention kernels": _Setting(_PRIVATE._get_sdp_priority_order, _PRIVATE._set_sdp_priority_order),
    "threads": _Setting(torch.get_num_threads, torch.set_num_threads),
}

_read_precisions = _reader(_PRECISIONS)
_WRITE_PRECISIONS = tuple(setting.set for setting in _PRECISIONS.values())

Precision: TypeAlias = tuple[Any, ...]
"""The settings that take long to read."""


class Ambient(NamedTuple):
    """What a call ran in."""

    settings: tuple[Any, ...]
    device: torch.device | None
    """Where factories make tensors, by ``torch.set_default_device`` or ``with torch.device(...)``."""
    modes: tuple[Any, ...]
    """The user's own modes, the innermost last. Torch's and ours either only look on or are on in backward as well."""
    precision: Precision
    """Empty for a call that has no use for them."""


_NOTHING: Any = (None, ())


class _Last:
    """The settings that were found last: they are the same ones nearly always."""

    ambient = Ambient((), None, (), ())
    precision: Precision = ()
    backward = -1


def ambient(precision: Precision) -> Ambient:
    """What a call runs in now; ``precision`` was read when its layer began, or is empty."""
    settings = _read_settings()
    device, modes = _modes() if function_modes() or dispatch_modes() else _NOTHING
    last = _Last.ambient
    if last.settings == settings and last.precision is precision and last.device == device and last.modes == modes:
        return last
    _Last.ambient = found = Ambient(settings, device, modes, precision)
    return found


def precision() -> Precision:
    """The precisions now."""
    found = _read_precisions()
    if found != _Last.precision:
        _Last.precision = found
    return _Last.precision


@contextmanager
def _set(was: Ambient, now: Ambient) -> Iterator[None]:
    with ExitStack() as stack:
        # What was set last is taken back first: a setting may set others.
        changed = [
            *zip(was.settings, now.settings, _WRITE, strict=True),
            *zip(was.precision, now.precision, _WRITE_PRECISIONS, strict=False),  # none, or all of them
        ]
        for before, current, write in changed:
            if before != current:
                stack.callback(write, current)
                write(before)
        if was.device != now.device:
            stack.enter_context(torch.device("cpu") if was.device is None else was.device)
        for mode in was.modes:
            if not any(mode is one for one in now.modes):
                stack.enter_context(mode)
        yield


def restored(was: Ambient) -> list[Any]:
    """Contexts that restore the settings; none if they did not change."""
    precise: Precision = ()
    if was.precision:
        backward = current_backward()
        if backward == -1 or backward != _Last.backward:
            precision()
            _Last.backward = backward
        precise = _Last.precision
    now = ambient(precise)
    return [] if now is was or now == was else [_set(was, now)]


def _modes() -> tuple[torch.device | None, tuple[Any, ...]]:
    device: torch.device | None = None
    modes: list[Any] = []
    for mode in (*function_modes_on(), *dispatch_modes_on()):
        if isinstance(mode, DeviceContext):
            device = mode.device
        elif not type(mode).__module__.startswith(("torch.", "lowtide.")):
            modes.append(mode)
    return device, tuple(modes)

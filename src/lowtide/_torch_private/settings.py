"""Torch's global settings that may choose another kernel: how each is read and set."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from lowtide._torch_private.needed import needed_for

_FEATURE = "recomputing under the settings of forward"
with needed_for(_FEATURE):
    from torch import _C

_private: Any = _C

__all__ = ["PRECISIONS", "SETTINGS", "Setting"]


class Setting(NamedTuple):
    """How one setting is read and written."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]


_ONE, _SMALLEST = 1.0, 5e-324


def _flushes() -> bool:
    """Whether this thread takes denormal numbers for zero. Torch cannot be asked, but Python's own product can."""
    return _SMALLEST * _ONE == 0.0


with needed_for(_FEATURE):
    SETTINGS = {
        "deterministic algorithms": Setting(
            _private._get_deterministic_algorithms,
            lambda value: _private._set_deterministic_algorithms(
                value, warn_only=_private._get_deterministic_algorithms_warn_only()
            ),
        ),
        "deterministic algorithms only warn": Setting(
            _private._get_deterministic_algorithms_warn_only,
            lambda value: _private._set_deterministic_algorithms(
                _private._get_deterministic_algorithms(), warn_only=value
            ),
        ),
        "fill uninitialized memory": Setting(
            _private._get_deterministic_fill_uninitialized_memory, _private._set_deterministic_fill_uninitialized_memory
        ),
        "default dtype": Setting(torch.get_default_dtype, torch.set_default_dtype),
        "flush denormal": Setting(_flushes, torch.set_flush_denormal),
        "flash attention": Setting(_private._get_flash_sdp_enabled, _private._set_sdp_use_flash),
        "math attention": Setting(_private._get_math_sdp_enabled, _private._set_sdp_use_math),
        "memory-efficient attention": Setting(
            _private._get_mem_efficient_sdp_enabled, _private._set_sdp_use_mem_efficient
        ),
        "cuDNN attention": Setting(_private._get_cudnn_sdp_enabled, _private._set_sdp_use_cudnn),
        "the device's own attention": Setting(
            _private._get_overrideable_sdp_enabled, _private._set_sdp_use_overrideable
        ),
        "cuDNN": Setting(_private._get_cudnn_enabled, _private._set_cudnn_enabled),
        "cuDNN benchmark": Setting(_private._get_cudnn_benchmark, _private._set_cudnn_benchmark),
        "cuDNN deterministic": Setting(_private._get_cudnn_deterministic, _private._set_cudnn_deterministic),
        "oneDNN": Setting(_private._get_mkldnn_enabled, _private._set_mkldnn_enabled),
    }
"""Settings that are cheap to read, by name."""


def _fp32(backend: str, operator: str) -> Setting:
    return Setting(
        partial(_private._get_fp32_precision_getter, backend, operator),
        lambda value: _private._set_fp32_precision_setter(backend, operator, value),
    )


def _legacy_precision() -> str | None:
    """The setting for all backends; None where they have been set one by one, which torch refuses to sum up."""
    try:
        found: str = _private._get_float32_matmul_precision()
    except RuntimeError:
        return None
    return found


def _set_legacy_precision(value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


with needed_for(_FEATURE):
    PRECISIONS = {
        "float32 products": Setting(_legacy_precision, _set_legacy_precision),  # first: it sets some of the others
        "float32": _fp32("generic", "all"),
        **{
            f"float32, {backend} {operator}": _fp32(backend, operator)
            for backend in ("cuda", "mkldnn")
            for operator in ("all", "matmul", "conv", "rnn")
        },
        "float16 reductions": Setting(
            _private._get_cublas_allow_fp16_reduced_precision_reduction,
            lambda value: _private._set_cublas_allow_fp16_reduced_precision_reduction(*value),
        ),
        "bfloat16 reductions": Setting(
            _private._get_cublas_allow_bf16_reduced_precision_reduction,
            lambda value: _private._set_cublas_allow_bf16_reduced_precision_reduction(*value),
        ),
        "float16 accumulation": Setting(
            _private._get_cublas_allow_fp16_accumulation, _private._set_cublas_allow_fp16_accumulation
        ),
        "float16 reductions on the host": Setting(
            _private._get_cpu_allow_fp16_reduced_precision_reduction,
            _private._set_cpu_allow_fp16_reduced_precision_reduction,
        ),
        "reductions of math attention": Setting(
            _private._get_math_sdp_allow_fp16_bf16_reduction, _private._set_math_sdp_allow_fp16_bf16_reduction
        ),
        "order of attention kernels": Setting(_private._get_sdp_priority_order, _private._set_sdp_priority_order),
        "threads": Setting(torch.get_num_threads, torch.set_num_threads),
    }
"""Settings that take long to read and are set for a whole run as a rule, by name."""

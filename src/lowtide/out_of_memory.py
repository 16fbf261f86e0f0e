"""Distinguish an out-of-memory error of the device from every other error, whatever class a backend raises.

[Note: what counts as out of memory]
The caller wants to offload tensors and retry the operator, so an error counts only if both make sense:

- The device's allocator refused. Some backends raise ``torch.OutOfMemoryError``, some a plain ``RuntimeError``; all say
  "out of memory" and how much they "tried to allocate".
- A library could not allocate on the device while it was called, such as cuBLAS its handle.

It does not count where the host's memory ran out, pinned or not: offloading would only take more of it. CUDA says of
pinned memory the same as of any other call of its driver, "CUDA error: out of memory", without a size; so that does not
count. Nor does what a queue reports later, in the name of an operator that has nothing to do with it: the operator that
did fail would be missing.
"""

from __future__ import annotations

import re

import torch

from lowtide.errors import LowtideError, UnitError
from lowtide.units import parse_bytes

__all__ = ["is_out_of_memory", "missing_bytes"]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device had no room for an allocation. See [Note: what counts as out of memory].

    >>> is_out_of_memory(RuntimeError("NPU out of memory. Tried to allocate 22.00 MiB (NPU 0)"))
    True
    >>> is_out_of_memory(RuntimeError("shape '[3]' is invalid for input of size 4"))
    False
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError) or isinstance(error, LowtideError):
        return False
    text = str(error)
    return _DEVICE.search(text) is not None and _ELSEWHERE.search(text) is None


def missing_bytes(error: BaseException) -> int:
    """How many bytes could not be allocated, as far as the message says it; otherwise a guess to begin with."""
    found = _TRIED.search(str(error))
    if found is not None:
        try:
            return max(parse_bytes(found[1].replace("bytes", "B")), 1)
        except UnitError:
            pass
    return _GUESS


_DEVICE = re.compile(
    r"out of memory\b.*\bTried to allocate\b"
    r"|\b(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS|HIPSOLVER|HIPSPARSE)_STATUS_ALLOC_FAILED\b"
    r"|\bCUFFT_ALLOC_FAILED\b|\bmiopenStatusAllocFailed\b|\brocblas_status_memory_error\b",
    re.DOTALL | re.IGNORECASE,
)
_ELSEWHERE = re.compile(
    r"pin(?:ned)?[ _]memory|page-locked|HostAlloc|CPUAllocator|The Inner error is reported", re.IGNORECASE
)
_TRIED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?\w+)")
_GUESS = 1 << 20

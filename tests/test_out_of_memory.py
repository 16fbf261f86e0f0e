"""What counts as out of memory, by messages that backends have raised; and that nothing of ours sounds like it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import lowtide
from lowtide.errors import RescueError
from lowtide.out_of_memory import is_out_of_memory, missing_bytes

MIB, GIB = 1 << 20, 1 << 30

DEVICE = {
    "cuda": (
        "CUDA out of memory. Tried to allocate 4.22 GiB. GPU 0 has a total capacity of 15.69 GiB of which 3.71 GiB is"
        " free. Including non-PyTorch memory, this process has 11.14 GiB memory in use.",
        int(4.22 * GIB),
    ),
    "cuda, older": (
        "CUDA out of memory. Tried to allocate 16.00 GiB (GPU 0; 11.93 GiB total capacity; 4.00 GiB already allocated;"
        " 7.33 GiB free; 179.00 KiB cached)",
        16 * GIB,
    ),
    "rocm": (
        "HIP out of memory. Tried to allocate 2.00 MiB. GPU 7 has a total capacity of 287.98 GiB of which 203.49 GiB is"
        " free. Of the allocated memory 68.63 GiB is allocated by PyTorch.",
        2 * MIB,
    ),
    "xpu": (
        "XPU out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 16.50 GiB. Of the allocated"
        " memory 16.50 GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated.",
        512 * MIB,
    ),
    "xpu, older": (
        "XPU out of memory. Tried to allocate 1.71 GiB (GPU 0; 15.56 GiB total capacity; 0 bytes already allocated)",
        int(1.71 * GIB),
    ),
    "npu": (
        "NPU out of memory. Tried to allocate 22.00 MiB (NPU 0; 60.97 GiB total capacity; 10.24 GiB already allocated;"
        " 10.24 GiB current active; 19.52 MiB free; 10.65 GiB reserved in total by PyTorch) If reserved memory is >>"
        " allocated memory try setting max_split_size_mb to avoid fragmentation.",
        22 * MIB,
    ),
    "mps": (
        "MPS backend out of memory (MPS allocated: 9.57 GiB, other allocations: 17.35 GiB, max allowed: 27.20 GiB)."
        " Tried to allocate 292.50 MiB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit"
        " for memory allocations (may cause system failure).",
        int(292.5 * MIB),
    ),
    "mps, a few bytes": (
        "MPS backend out of memory (MPS allocated: 16.00 GB, other allocations: 3.31 GB, max allowed: 18.13 GB). Tried"
        " to allocate 256 bytes on shared pool.",
        256,
    ),
    "cublas": ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", MIB),
    "cudnn": ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", MIB),
    "hipblas": ("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`", MIB),
}
"""By backend: what it says, and how many bytes were missing; a guess where it does not say."""

OTHER = {
    "the host's memory": (
        "[enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"
        " 18000000000000 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "pinned memory": "CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
    "pinned memory of the virtual device": "tide error: out of memory: could not pin 4096 bytes of host memory; x",
    "a loader's thread": (
        "Caught OutOfMemoryError in pin memory thread for device 0.\nCUDA out of memory. Tried to allocate 2.00 MiB."
    ),
    "reported by a queue": (
        "The Inner error is reported as above. The process exits for this inner error, and the current working operator"
        " name is Conv2D.\nNPU out of memory. Tried to allocate 2.00 MiB"
    ),
    "a kernel that does not exist": "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
    "a wrong address": "CUDA error: an illegal memory access was encountered",
    "a shape": "shape '[3]' is invalid for input of size 4",
}


@pytest.mark.parametrize("backend", DEVICE)
def test_every_backends_words_count(backend: str) -> None:
    text, missing = DEVICE[backend]
    assert is_out_of_memory(RuntimeError(text))
    assert is_out_of_memory(torch.OutOfMemoryError(text))
    assert missing_bytes(RuntimeError(text)) == missing


@pytest.mark.parametrize("what", OTHER)
def test_nothing_else_does(what: str) -> None:
    assert not is_out_of_memory(RuntimeError(OTHER[what]))


def test_an_error_of_another_kind_does_not_count_whatever_it_says() -> None:
    text = DEVICE["cuda"][0]
    assert not is_out_of_memory(ValueError(text))
    assert not is_out_of_memory(RescueError(text))


SOUNDS_LIKE_IT = (
    " out of memory.",
    "CUDA out of memory.",
    "DefaultCPUAllocator: can't allocate memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
)
"""Trainers that find a batch size by trial look for these, and would begin again with a smaller batch."""


def test_no_message_of_ours_makes_a_trainer_reduce_its_batch() -> None:
    found = []
    for file in Path(lowtide.__file__).parent.rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        found += [
            f"{file.name}: {node.value}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
            and any(words in node.value for words in SOUNDS_LIKE_IT)
        ]
    # A Trainer with auto_find_batch_size=True has asked for it.
    assert found == ["transformers.py: lowtide: out of memory. "]


def test_the_list_of_such_words_is_accelerates_own() -> None:
    memory = pytest.importorskip("accelerate.utils.memory")
    for words in SOUNDS_LIKE_IT:
        assert memory.should_reduce_batch_size(RuntimeError(f"x{words}"))
    assert not memory.should_reduce_batch_size(RescueError(f"x{SOUNDS_LIKE_IT[0]}"))

"""On the path of a process: the virtual accelerator is its device, with TIDE_CAPACITY bytes of memory.

A script that knows nothing of it then finds it as ``torch.accelerator.current_accelerator()``. What the process has had
of it at most is written to TIDE_PEAK when it ends, unless it is a launcher, which has nothing.
"""

import atexit
import os
from pathlib import Path

import torch

import tide

tide.configure(capacity=int(os.environ["TIDE_CAPACITY"]))


def _write_peak() -> None:
    peak = torch.accelerator.max_memory_allocated()
    if peak and "TIDE_PEAK" in os.environ:
        Path(os.environ["TIDE_PEAK"]).write_text(str(peak))


atexit.register(_write_peak)

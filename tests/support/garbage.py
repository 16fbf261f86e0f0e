"""What is left over goes before memory is measured."""

from __future__ import annotations

import gc
import time

__all__ = ["collect_garbage"]


def collect_garbage() -> None:
    """Collect cycles, and let autograd's thread drop what it holds of the last backward.

    It may still hold a gradient or a whole graph when backward returns, and needs the interpreter's lock to let it go.
    """
    gc.collect()
    time.sleep(0.01)

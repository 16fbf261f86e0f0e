"""Ranges in torch's profiler."""

from __future__ import annotations

from lowtide._torch_private.needed import needed_for

with needed_for("ranges in profiles"):
    # torch.profiler.record_function dispatches an operator: it costs microseconds without a profiler, and modes see it.
    from torch._C._profiler import _RecordFunctionFast as profiler_range

__all__ = ["profiler_range"]

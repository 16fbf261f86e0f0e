"""Fake tensors: shapes and bytes without memory."""

from __future__ import annotations

from lowtide._torch_private.needed import needed_for

with needed_for("tracing with fake tensors"):
    from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = [
    "FakeTensorMode",
]

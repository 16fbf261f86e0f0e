"""Collectives: a `torch.distributed` backend named `tide`, registered when tide is imported.

dist.init_process_group("cpu:gloo,tide:tide", ...)
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from . import _C


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.Backend:
    # One gloo group for the tensors and one for the clocks: see [Note: collectives].
    data = dist.ProcessGroupGloo(dist.PrefixStore("tide/data", store), rank, size, timeout)
    clock = dist.ProcessGroupGloo(dist.PrefixStore("tide/clock", store), rank, size, timeout)
    return _C.Backend(data, clock)


def register() -> None:
    """Make the backend known to torch.distributed."""
    if dist.is_available() and "tide" not in dist.Backend.backend_list:
        _C.bind_backend()
        dist.Backend.register_backend("tide", _create, devices=["tide"])

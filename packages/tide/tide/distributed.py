"""Collectives: a `torch.distributed` backend named `tide`, registered when tide is imported.

dist.init_process_group("cpu:gloo,tide:tide", ...)
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from . import _C


def _create(options: Any, _: Any) -> dist.Backend:
    # One gloo group for the tensors and one for the clocks: see [Note: collectives].
    rank, size = options.group_rank, options.group_size
    data, clock = (
        dist.ProcessGroupGloo(
            dist.PrefixStore(f"tide/{name}", options.store), rank, size, options.timeout
        )
        for name in ("data", "clock")
    )
    # The group of all ranks is not told which they are.
    return _C.Backend(data, clock, list(options.global_ranks_in_group) or list(range(size)))


def register() -> None:
    """Make the backend known to torch.distributed."""
    if dist.is_available() and "tide" not in dist.Backend.backend_list:
        _C.bind_backend()
        dist.Backend.register_backend("tide", _create, extended_api=True, devices=["tide"])

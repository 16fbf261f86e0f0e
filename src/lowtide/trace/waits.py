"""Where the host waits for a device, in a model that is traced without values."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.trace.trace import READ_BY_HOST

__all__ = ["read_by_host"]


@torch.library.custom_op(READ_BY_HOST, mutates_args=())
def read_by_host(values: Tensor) -> Tensor:
    """In place of reading ``values`` on the host: a copy, which the host waits for."""
    return values.clone()


@read_by_host.register_fake
def _(values: Tensor) -> Tensor:
    return torch.empty_like(values)

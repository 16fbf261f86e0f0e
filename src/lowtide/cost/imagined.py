"""Let fake tensors on the CPU choose the kernels that an accelerator would.

A trace without a device is made with fake tensors on the CPU, and so with the CPU's choice of kernels. Two choices
differ: an accelerator has one kernel for RMSNorm, which saves its input and a number a row, where the CPU's several
kernels also save the normalised input; and one for dropout, whose mask is booleans. While :func:`device_kernels` is
open they are chosen on the CPU too. Real tensors must not be computed with then.

Not changed: attention with dropout, which the CPU's flash kernel does not have, so that its scores are saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lowtide._torch_private.operators import forget_dispatch, scoped_library
from lowtide.cost.kernels import Family

__all__ = ["device_kernels"]


@contextmanager
def device_kernels(family: Family) -> Iterator[None]:
    """While open, fake tensors on the CPU go through the kernels of a family of devices; nothing changes for ``cpu``.

    ``with device_kernels(family_of("h100")), FakeTensorMode(): …``
    """
    if family == "cpu":
        yield
        return
    changed = ("_fused_rms_norm", "_fused_rms_norm_backward", "dropout")
    try:
        with scoped_library("aten", "IMPL") as library:
            # With a kernel for the CPU the operator is not taken apart, and autograd's own formula for it applies.
            library.impl("_fused_rms_norm", _rms_norm, "CPU")
            library.impl("_fused_rms_norm_backward", _rms_norm_backward, "CPU")
            library.impl("dropout", _dropout, "AutogradCPU")
            forget_dispatch(*changed)
            yield
    finally:
        forget_dispatch(*changed)


def _rms_norm(
    given: Tensor, shape: Sequence[int], weight: Tensor | None = None, epsilon: float | None = None
) -> tuple[Tensor, Tensor]:
    rows = (*given.shape[: given.dim() - len(shape)], *(1 for _ in shape))
    exact = torch.promote_types(given.dtype, torch.float32)
    return torch.empty(given.shape, dtype=given.dtype), torch.empty(rows, dtype=exact)


def _rms_norm_backward(
    gradient: Tensor, given: Tensor, shape: Sequence[int], scale: Tensor, weight: Tensor | None, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    towards_weight = torch.empty_like(weight) if mask[1] and weight is not None else None
    return torch.empty(given.shape, dtype=given.dtype) if mask[0] else None, towards_weight


def _dropout(given: Tensor, share: float, train: bool) -> Tensor:
    if not train or share == 0:
        return given
    return torch.native_dropout(given, share, train)[0] if share < 1 else given * 0

"""What is compared of a tensor that was recomputed: shape, stride, dtype and device."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from lowtide.errors import RebuildError

__all__ = ["TensorForm", "compare_form", "form_of_tensor"]

TensorForm: TypeAlias = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
"""Shape, stride, dtype and device."""


def form_of_tensor(tensor: Tensor) -> TensorForm | None:
    """The form of a tensor; None for one that has no strides, such as a nested one."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def compare_form(tensor: Tensor, form: TensorForm | None, whose: str) -> None:
    """RebuildError if a replay gave a tensor of another form."""
    found = form_of_tensor(tensor)
    if form is not None and form != found:
        raise RebuildError(
            f"{whose} cannot be recomputed: what it gave when it ran had {_described(form)}; when it was replayed it"
            f" gave {_described(found)}; keep it"
        )


def _described(form: TensorForm | None) -> str:
    if form is None:
        return "no strides"
    shape, stride, dtype, device = form
    return f"shape {tuple(shape)}, stride {stride}, dtype {dtype}, device {device}"

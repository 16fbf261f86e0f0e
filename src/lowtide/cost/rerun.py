"""Run a single kernel by itself, from its kind and its shape text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lowtide._torch_private.operators import resolved_operator
from lowtide.cost.kernels import ATTENTION, attention_arguments
from lowtide.cost.shape import Name, TensorShape, read_shape
from lowtide.errors import TraceError

__all__ = ["CannotRerunError", "arguments_of", "rerun"]


class CannotRerunError(TraceError):
    """A kernel cannot be run by itself: it is no operator, or its arguments cannot be made."""


def arguments_of(kind: str, shape: str, device: torch.device) -> tuple[list[Any], dict[str, Any]]:
    """Arguments like those of a shape text, on a device: normal numbers, and integers that are valid as indices.

    The ends of a grouped product's groups divide its rows evenly. Other integers are zeros.
    """
    given, named = read_shape(shape)
    generator = torch.Generator().manual_seed(0)

    def make(value: Any) -> Any:
        if isinstance(value, TensorShape):
            return _tensor(value, device, generator)
        if isinstance(value, Name):
            return _named(value, device)
        return [make(one) for one in value] if isinstance(value, list) else value

    args = [make(value) for value in given]
    kwargs = {name: make(value) for name, value in named.items() if name != "generator"}
    if "grouped_mm" in kind:
        for value in [*args[2:], *kwargs.values()]:
            if isinstance(value, Tensor) and not value.is_floating_point():
                rows = args[0].shape[0] if args[0].dim() == 2 and args[1].dim() == 3 else args[0].shape[-1]
                ends = torch.arange(1, value.numel() + 1) * rows // value.numel()
                value.copy_(ends.to(value.dtype))
    return args, kwargs


def rerun(kind: str, shape: str, device: torch.device) -> Callable[[], Any]:
    """Return a function that runs the kernel on a device each time it is called; CannotRerunError if it cannot be run.

    Attention of another device's kind is run as the attention that this device chooses.
    """
    args, kwargs = arguments_of(kind, shape, device)
    if kind in ATTENTION and not ("for_cpu" in kind and device.type == "cpu"):
        return _attention(kind, args, kwargs)
    try:
        operator = resolved_operator(kind, args, kwargs)
    except (AttributeError, RuntimeError) as error:
        raise CannotRerunError(f"{kind} is no operator of this torch that takes {shape}: {error}") from None

    def call() -> Any:
        return operator(*args, **kwargs)

    return call


def _attention(kind: str, args: list[Any], kwargs: dict[str, Any]) -> Callable[[], Any]:
    found = attention_arguments(kind, args, kwargs)
    query, key, value = found.query, found.key, found.value
    grouped = query.dim() == 4 and query.shape[1] != key.shape[1]

    def attend() -> Tensor:
        return functional.scaled_dot_product_attention(
            query, key, value, found.mask, 0.0, found.causal, scale=found.scale, enable_gqa=grouped
        )

    if found.gradient is None:
        return attend
    gradient = found.gradient
    with torch.enable_grad():
        query, key, value = (one.detach().requires_grad_() for one in (query, key, value))
        output = attend()

    def differentiate() -> tuple[Tensor, ...]:
        return torch.autograd.grad(output, (query, key, value), gradient, retain_graph=True)

    return differentiate


def _tensor(like: TensorShape, device: torch.device, generator: torch.Generator) -> Tensor:
    dtype = getattr(torch, like.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CannotRerunError(f"this torch has no dtype {like.dtype}")
    if dtype.is_floating_point and dtype.itemsize > 1:
        whole = torch.randn(like.extent, dtype=torch.float32, generator=generator).to(device, dtype)
    else:
        whole = torch.zeros(like.extent, dtype=torch.uint8).to(device, dtype)
    return whole.as_strided(like.shape, like.strides)


def _named(value: Name, device: torch.device) -> Any:
    if value.name == "device":
        return device
    found = getattr(torch, value.name.removeprefix("torch."), None) if value.name else None
    if found is None:
        raise CannotRerunError(f"an argument cannot be made again: {value.name or 'it was not written down'}")
    return found

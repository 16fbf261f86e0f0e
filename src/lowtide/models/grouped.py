"""Products of each expert's tokens with its own weights: one grouped product, or one product an expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from lowtide.errors import ModelError

__all__ = ["GroupedLinear", "grouped_is_faster", "grouped_product", "loop_product"]

ALIGNMENT = 16
"""The bytes that rows must be multiples of in torch's grouped product."""


def grouped_is_faster(device: str, dtype: torch.dtype) -> bool:
    """Whether the grouped product is taken; ``benchmarks/moe.py`` measures it against the loop.

    It is the faster one in every type that torch's kernel knows, on a CPU too, where the fewer copies count; in double
    precision there is no kernel.
    """
    return dtype in (torch.bfloat16, torch.float16, torch.float32)


class GroupedLinear(nn.Module):
    """The weights of all experts of a rank for one projection, ``[experts, out, in]``.

    As a DTensor, sharded over experts or over a width or both, each rank uses what it holds.
    """

    def __init__(self, experts: int, inputs: int, outputs: int, *, grouped: bool | None) -> None:
        super().__init__()
        self.grouped = grouped
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """``tokens`` are those of the first expert, then those of the second, and so on, as ``counts`` has it."""
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        kind = tokens.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            tokens, weight = tokens.to(dtype), weight.to(dtype)
        if tokens.dtype != weight.dtype:
            raise ModelError(
                f"an expert has weights of {weight.dtype} and gets tokens of {tokens.dtype}: cast one of them, or run"
                " under autocast"
            )
        if self.grouped is not False and grouped_is_faster(kind, tokens.dtype):
            return grouped_product(tokens, weight, counts)
        return loop_product(tokens, weight, counts)


def grouped_product(tokens: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """All experts in one call; widths whose rows are no multiple of 16 bytes are padded with zeros."""
    outputs, inputs = weight.shape[1:]
    step = ALIGNMENT // weight.element_size()
    more_inputs, more_outputs = -inputs % step, -outputs % step
    if more_inputs or more_outputs:
        weight = functional.pad(weight, (0, more_inputs, 0, more_outputs))
        tokens = functional.pad(tokens, (0, more_inputs))
    ends = counts.cumsum(0).to(torch.int32)
    product = functional.grouped_mm(tokens, weight.transpose(-2, -1), offs=ends)
    return product[:, :outputs] if more_outputs else product


def loop_product(tokens: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """One product an expert."""
    product: Tensor = _Loop.apply(tokens, weight, counts)
    return product


class _Loop(torch.autograd.Function):
    """Saves tokens and weights once and not expert by expert, and writes every product where it belongs."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(tokens, weight, counts)
        sizes = counts.tolist()
        product = tokens.new_empty(len(tokens), weight.shape[1])
        for part, one, out in zip(tokens.split(sizes), weight.unbind(), product.split(sizes), strict=True):
            torch.mm(part, one.t(), out=out)
        return product

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        tokens, weight, counts = ctx.saved_tensors
        sizes = counts.tolist()
        parts = gradients[0].split(sizes)
        towards_tokens = towards_weight = None
        if ctx.needs_input_grad[0]:
            towards_tokens = torch.empty_like(tokens)
            for part, one, out in zip(parts, weight.unbind(), towards_tokens.split(sizes), strict=True):
                torch.mm(part, one, out=out)
        if ctx.needs_input_grad[1]:
            towards_weight = torch.empty_like(weight)
            for part, one, out in zip(parts, tokens.split(sizes), towards_weight.unbind(), strict=True):
                torch.mm(part.t(), one, out=out)
        return towards_tokens, towards_weight, None

"""Fill a model with fresh weights that are the same in every layout.

The values of a parameter depend on the seed, its name in the whole model and the block of rows they are in, and on
nothing else: not on the rank, the device, or what was filled before. A rank draws the blocks it holds rows of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowtide._torch_private.placements import held_indices
from lowtide.models.decoder import Decoder
from lowtide.models.kernels import choose

__all__ = ["global_name", "initialise"]

BLOCK_ROWS, BLOCK_NUMBERS = 1024, 1 << 20
"""A block has at most so many rows, and as few as it takes to be no larger than so many numbers."""
WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""What others put into the names of parameters."""


def initialise(model: nn.Module, *, seed: int) -> None:
    """Fill every parameter of a materialised model, sharded or not, and make its buffers.

    Matrices are normal with the shape's ``initializer_range``, norms are one and biases zero.

    ``model.to_empty(device="cpu"); initialise(model, seed=42)``
    """
    decoder = next((module for module in model.modules() if isinstance(module, Decoder)), None)
    deviation = decoder.shape.initializer_range if decoder is not None else 0.02
    if decoder is not None:
        decoder.tie()
    norms = {id(one) for module in model.modules() if isinstance(module, nn.RMSNorm) for one in module.parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if id(parameter) in norms:
                local.fill_(1.0)
            elif name.endswith("bias"):
                local.zero_()
            else:
                _fill(local, parameter, f"{seed}/{global_name(name)}", deviation)
    if decoder is not None:
        decoder.make_buffers()
        device = next(decoder.parameters()).device
        choose("rope", decoder.shape.fused_rope, device)  # now rather than in the first step, so that the log says it
        choose("swiglu", decoder.shape.fused_swiglu, device)


def global_name(name: str) -> str:
    """A parameter's name in the bare model.

    >>> global_name("module.layers.3._orig_mod.attention.wq.weight")
    'layers.3.attention.wq.weight'
    """
    for wrapper in WRAPPERS:
        name = name.replace(f".{wrapper}", ".").removeprefix(wrapper)
    return name


def _fill(local: Tensor, parameter: Tensor, key: str, deviation: float) -> None:
    """Fill the part of a parameter that this rank holds."""
    shape = tuple(parameter.shape)
    held: list[Any] = held_indices(parameter) if isinstance(parameter, DTensor) else [None] * len(shape)
    rows = torch.arange(shape[0]) if held[0] is None else held[0]
    for first, block in _blocks(key, shape, rows):
        here = ((rows >= first) & (rows < first + len(block))).nonzero().squeeze(1)
        values = block.index_select(0, rows[here] - first) * deviation
        for dimension, places in enumerate(held[1:], 1):
            if places is not None and len(places) != shape[dimension]:
                values = values.index_select(dimension, places)
        local.index_copy_(0, here.to(local.device), values.to(local.device, local.dtype))


def _blocks(key: str, shape: tuple[int, ...], rows: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The blocks that have any of ``rows``, each with its first row."""
    numbers_a_row = max(1, torch.Size(shape[1:]).numel())
    height = max(1, min(BLOCK_ROWS, BLOCK_NUMBERS // numbers_a_row))
    for number in dict.fromkeys((rows // height).tolist()):
        first = number * height
        count = min(height, shape[0] - first)
        digest = hashlib.blake2b(f"{key}/{number}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") & (2**63 - 1))
        yield first, torch.randn((count, *shape[1:]), generator=generator, dtype=torch.float32)

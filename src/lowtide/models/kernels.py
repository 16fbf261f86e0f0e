"""Fused kernels for rotary positions and SwiGLU: which ones there are, and which one a device gets.

A fused kernel is one custom operator with a backward of its own. That makes it opaque to everything that watches a
layer: a compiled function under a dispatch mode would silently run uncompiled, and so give other bits in the step in
which lowtide profiles a layer than in the others. Sizes are symbolic from the first compilation on, so that one kernel
serves all of them and a call that is recomputed in backward gives the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from lowtide._torch_private.modes import DisableTorchFunction

__all__ = ["Kernel", "choose", "eager_rope", "eager_swiglu", "rope", "swiglu"]

log = logging.getLogger(__name__)

Name = Literal["rope", "swiglu"]
Implementation = Literal["liger", "compiled", "eager"]
Rope: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
SwiGLU: TypeAlias = Callable[[Tensor, Tensor], Tensor]

LIGER_DEVICES = ("cuda", "xpu", "npu")
"""Where Liger-Kernel's Triton kernels run; rocm calls itself cuda."""


class Kernel(NamedTuple):
    """What computes a fused function on a device."""

    name: Name
    """What it computes."""
    implementation: Implementation
    """Whose kernel it is."""
    function: Callable[..., Any]
    """The kernel: ``rope(queries, keys, cosine, sine)`` or ``swiglu(gate, up)``."""


def choose(name: Name, requested: bool, device: torch.device) -> Kernel:
    """The kernel for a device: Liger-Kernel's where it runs, else a compiled function, else eager.

    A fusion that was not asked for is eager. The choice is logged once; one that is asked for and not active is a
    warning that says why.

    >>> choose("swiglu", False, torch.device("cpu")).implementation
    'eager'
    """
    return _choose(name, requested, device.type)


def rope(requested: bool, device: torch.device) -> Rope:
    """What turns queries and keys on a device."""
    return choose("rope", requested, device).function


def swiglu(device: torch.device) -> SwiGLU:
    """What computes a fused SwiGLU on a device."""
    return choose("swiglu", True, device).function


@cache
def _choose(name: Name, requested: bool, device: str) -> Kernel:
    eager: Callable[..., Any] = eager_rope if name == "rope" else eager_swiglu
    if not requested or device == "meta":
        return Kernel(name, "eager", eager)
    fused: Callable[..., Any] = torch.ops.lowtide.rope if name == "rope" else torch.ops.lowtide.swiglu
    reasons = []
    for implementation in ("liger", "compiled"):
        if reason := _unfit(name, implementation, device):
            reasons.append(f"{implementation}: {reason}")
            continue
        log.info("fused %s on %s: %s", name, device, implementation)
        return Kernel(name, implementation, partial(_call, fused, implementation))
    log.warning("fused %s was asked for and is not active on %s (%s); it runs eager", name, device, "; ".join(reasons))
    return Kernel(name, "eager", eager)


def _call(fused: Any, implementation: str, *tensors: Tensor) -> Any:
    return fused(*tensors, implementation)


def _unfit(name: Name, implementation: Implementation, device: str) -> str:
    """Why an implementation does not run on a device; empty if it does. It is tried on a few numbers."""
    if implementation == "liger":
        if device not in LIGER_DEVICES:
            return f"it has no kernels for {device}"
        if find_spec("liger_kernel") is None:
            return "it is not installed (pip install 'lowtide[liger]')"
    try:
        with torch.inference_mode(False), torch.enable_grad():
            # No two sizes alike: sizes that are equal here would be taken to be equal always, and compiled in.
            ones = torch.ones(3, 5, 7, 8, device=device, requires_grad=True)
            table = torch.ones(5, 1, 8, device=device)
            if name == "rope":
                sum(torch.ops.lowtide.rope(ones, ones, table, table, implementation)).sum().backward()
            else:
                torch.ops.lowtide.swiglu(ones, ones, implementation).sum().backward()
    except Exception as error:  # a missing compiler, a kernel that does not build: whatever it is, eager works
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return ""


# The functions themselves.


def eager_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``."""
    return functional.silu(gate) * up


def eager_rope(queries: Tensor, keys: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys turned; computed in the table's precision, returned in their own."""
    return _turned(queries, cosine, sine), _turned(keys, cosine, sine)


def _turned(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return (heads * cosine + torch.cat((-second, first), dim=-1) * sine).to(heads.dtype)


def _swiglu_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    whole = torch.promote_types(gate.dtype, torch.float32)
    gate_, up_, gradient_ = gate.to(whole), up.to(whole), gradient.to(whole)
    sigmoid = gate_.sigmoid()
    silu = gate_ * sigmoid
    towards_gate = gradient_ * up_ * (sigmoid + silu * (1 - sigmoid))
    return towards_gate.to(gate.dtype), (gradient_ * silu).to(up.dtype)


def _swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    whole = torch.promote_types(gate.dtype, torch.float32)
    gate_ = gate.to(whole)
    return (gate_ * gate_.sigmoid()).to(gate.dtype) * up


def _halves(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """As :func:`_turned`, in the form that compiles to one loop."""
    half = heads.shape[-1] // 2
    first, second = heads[..., :half], heads[..., half:]
    low = first * cosine[..., :half] - second * sine[..., :half]
    high = second * cosine[..., half:] + first * sine[..., half:]
    return torch.cat((low, high), dim=-1).to(heads.dtype)


def _halves_backward(gradient: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """The transpose of the turn: by the same angles, back."""
    half = gradient.shape[-1] // 2
    first, second = gradient[..., :half], gradient[..., half:]
    low = first * cosine[..., :half] + second * sine[..., half:]
    high = second * cosine[..., half:] - first * sine[..., :half]
    return torch.cat((low, high), dim=-1).to(gradient.dtype)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def _run_compiled(function: Callable[..., Any], *tensors: Tensor) -> Any:
    # A function mode that watches a layer is not to be traced into the kernel, and whether gradients are on, which is
    # not the same in a call and in its repetition, is not to make another kernel.
    with DisableTorchFunction(), torch.no_grad():
        return _compiled(function)(*tensors)


def _plain(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The same contiguous values in another shape, and no view: of a view the compiler compiles the base's shape in."""
    whole = tensor.contiguous()
    plain: Any = torch.empty(0, dtype=whole.dtype, device=whole.device)
    plain.set_(whole.untyped_storage(), whole.storage_offset(), shape)
    alike: Tensor = plain
    return alike


def _flat(tensor: Tensor) -> Tensor:
    return _plain(tensor, (tensor.numel(),))


# SwiGLU as one operator.


@torch.library.custom_op("lowtide::swiglu", mutates_args=())
def _swiglu(gate: Tensor, up: Tensor, implementation: str) -> Tensor:
    if gate.numel() < 2:  # one compiled kernel serves all sizes but nothing and one
        return eager_swiglu(gate, up).clone()
    if implementation == "liger":
        from liger_kernel.ops.swiglu import swiglu_forward

        _, _, output = swiglu_forward(gate.contiguous(), up.contiguous())
        fused: Tensor = output.view(gate.shape)
        return fused
    flat: Tensor = _run_compiled(_swiglu_forward, _flat(gate), _flat(up))
    return flat.view(gate.shape)


@torch.library.custom_op("lowtide::swiglu_backward", mutates_args=())
def _swiglu_gradients(gradient: Tensor, gate: Tensor, up: Tensor, implementation: str) -> tuple[Tensor, Tensor]:
    if gate.numel() < 2:
        return _swiglu_backward(gradient, gate, up)
    if implementation == "liger":
        from liger_kernel.ops.swiglu import swiglu_backward

        # It writes its results over what it is given.
        first, second = swiglu_backward(
            gate.clone(memory_format=torch.contiguous_format),
            up.clone(memory_format=torch.contiguous_format),
            gradient.contiguous(),
        )
    else:
        first, second = _run_compiled(_swiglu_backward, _flat(gradient), _flat(gate), _flat(up))
    return first.view(gate.shape), second.view(gate.shape)


@_swiglu.register_fake
def _(gate: Tensor, up: Tensor, implementation: str) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


@_swiglu_gradients.register_fake
def _(gradient: Tensor, gate: Tensor, up: Tensor, implementation: str) -> tuple[Tensor, Tensor]:
    shape = torch.contiguous_format
    return torch.empty_like(gate, memory_format=shape), torch.empty_like(up, memory_format=shape)


def _swiglu_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, ctx.implementation = inputs
    ctx.save_for_backward(gate, up)


def _swiglu_autograd(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    first, second = torch.ops.lowtide.swiglu_backward(gradient, *ctx.saved_tensors, ctx.implementation)
    return first, second, None


_swiglu.register_autograd(_swiglu_autograd, setup_context=_swiglu_context)


# Rotary positions as one operator.


@torch.library.custom_op("lowtide::rope", mutates_args=())
def _rope(queries: Tensor, keys: Tensor, cosine: Tensor, sine: Tensor, implementation: str) -> tuple[Tensor, Tensor]:
    if implementation == "liger":
        from liger_kernel.ops.rope import rope_forward

        return _liger_rope(rope_forward, queries, keys, cosine, sine)
    tables = [_plain(table, tuple(table.shape)) for table in (cosine, sine)]
    turned = [_run_compiled(_halves, _plain(heads, tuple(heads.shape)), *tables) for heads in (queries, keys)]
    return turned[0], turned[1]


@torch.library.custom_op("lowtide::rope_backward", mutates_args=())
def _rope_gradients(
    queries: Tensor, keys: Tensor, cosine: Tensor, sine: Tensor, implementation: str
) -> tuple[Tensor, Tensor]:
    if implementation == "liger":
        from liger_kernel.ops.rope import rope_backward

        return _liger_rope(rope_backward, queries, keys, cosine, sine)
    tables = [_plain(table, tuple(table.shape)) for table in (cosine, sine)]
    turned = [_run_compiled(_halves_backward, _plain(heads, tuple(heads.shape)), *tables) for heads in (queries, keys)]
    return turned[0], turned[1]


def _liger_rope(kernel: Any, queries: Tensor, keys: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """Liger-Kernel takes heads before the sequence, and the table with a batch; it writes over what it is given."""
    tables = [table.squeeze(-2).reshape(-1, *table.squeeze(-2).shape[-2:]).contiguous() for table in (cosine, sine)]
    turned = kernel(queries.clone().transpose(1, 2), keys.clone().transpose(1, 2), *tables)
    return turned[0].transpose(1, 2).contiguous(), turned[1].transpose(1, 2).contiguous()


@_rope.register_fake
@_rope_gradients.register_fake
def _(queries: Tensor, keys: Tensor, cosine: Tensor, sine: Tensor, implementation: str) -> tuple[Tensor, Tensor]:
    shape = torch.contiguous_format
    return torch.empty_like(queries, memory_format=shape), torch.empty_like(keys, memory_format=shape)


def _rope_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, cosine, sine, ctx.implementation = inputs
    ctx.save_for_backward(cosine, sine)


def _rope_autograd(ctx: Any, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
    first, second = torch.ops.lowtide.rope_backward(queries, keys, *ctx.saved_tensors, ctx.implementation)
    return first, second, None, None, None


_rope.register_autograd(_rope_autograd, setup_context=_rope_context)

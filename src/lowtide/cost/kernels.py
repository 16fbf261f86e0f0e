"""The kernel table: floating-point operations of kernels, and which devices have the same ones.

A trace is made with fake tensors on the CPU. Their shapes are right; which kernel a device would choose is not always,
and neither are the FLOPs that torch's own registry has for it: it lacks the CPU's flash attention and the grouped
product. Nothing here imports torch: an argument is a tensor if it has a shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Literal, NamedTuple, TypeAlias

__all__ = [
    "ATTENTION",
    "MATMUL",
    "AttentionArguments",
    "Family",
    "attention_arguments",
    "family_of",
    "kernel_flops",
    "kind_of",
]

Family: TypeAlias = Literal["cpu", "cuda", "rocm", "npu", "hpu", "other"]
"""Devices whose kernels save the same."""

Arguments: TypeAlias = Sequence[Any]


def kind_of(name: str) -> str:
    """The kind of kernel that an operator's name means; overloads are of one kind.

    >>> kind_of("aten.mm.default"), kind_of("aten::sum.dim_IntList"), kind_of("aten::mm")
    ('aten::mm', 'aten::sum', 'aten::mm')
    """
    space, colons, rest = name.partition("::")
    if not colons:
        space, _, rest = name.partition(".")
    return f"{space}::{rest.partition('.')[0]}"


def kernel_flops(func_name: str, args: Arguments, kwargs: Mapping[str, Any], result: Any) -> int:
    """The floating-point operations of a kernel where they can bound it, by its arguments' shapes; otherwise 0.

    A product of m x k by k x n numbers is ``2 * m * k * n``. Attention has two such products in forward and five in
    backward, where the scores are computed again; a causal mask leaves half.
    """
    count = _COUNTS.get(kind_of(func_name))
    return count(args, kwargs, result) if count is not None else 0


# Products.


def _product(left: int, right: int) -> Callable[[Arguments, Mapping[str, Any], Any], int]:
    """Every element of the left side meets one row of the right side."""

    def count(args: Arguments, kwargs: Mapping[str, Any], result: Any) -> int:
        first, second = args[left].shape, args[right].shape
        return 2 * prod(map(int, first)) * (int(second[-1]) if len(second) >= 2 else 1)

    return count


def _linear(args: Arguments, kwargs: Mapping[str, Any], result: Any) -> int:
    first, weight = args[0].shape, args[1].shape
    return 2 * prod(map(int, first)) * (int(weight[0]) if len(weight) >= 2 else 1)


def _grouped(args: Arguments, kwargs: Mapping[str, Any], result: Any) -> int:
    """Rows of a two-dimensional side are split among the groups: each row meets one group only."""
    left, right = args[0].shape, args[1].shape
    all_groups = 2 * prod(map(int, left)) * int(right[-1])
    return all_groups // int(left[0]) if len(left) == 3 and len(right) == 2 else all_groups


def _convolution(args: Arguments, kwargs: Mapping[str, Any], result: Any) -> int:
    transposed = bool(_argument(args, kwargs, 6, "transposed", False))
    return _filtered(args[0].shape if transposed else result.shape, args[1].shape)


def _convolution_backward(args: Arguments, kwargs: Mapping[str, Any], result: Any) -> int:
    transposed = bool(_argument(args, kwargs, 7, "transposed", False))
    mask = _argument(args, kwargs, 10, "output_mask", (True, True, True))
    wanted = sum(map(bool, mask[:2]))
    return wanted * _filtered(args[1].shape if transposed else args[0].shape, args[2].shape)


def _filtered(places: Sequence[int], weight: Sequence[int]) -> int:
    """Each sample and place meets every filter: ``places`` is samples, channels and the places' dimensions."""
    return 2 * int(places[0]) * prod(map(int, places[2:])) * prod(map(int, weight))


# Attention.


class AttentionArguments(NamedTuple):
    """The arguments that all kinds of attention have."""

    query: Any
    key: Any
    value: Any
    causal: bool
    gradient: Any = None
    """Of the output; None in forward."""
    mask: Any = None
    scale: float | None = None


def attention_arguments(kind: str, args: Arguments, kwargs: Mapping[str, Any]) -> AttentionArguments:
    """Find them among the arguments of a kind of :data:`ATTENTION`."""
    backward = kind in _BACKWARD  # it is given the gradient first
    query, key, value = args[1:4] if backward else args[:3]
    mask = kwargs.get("attn_mask")
    if (place := _MASK.get(kind)) is not None and place < len(args):
        mask = args[place]
    causal = _argument(args, kwargs, (_BACKWARD if backward else _FORWARD)[kind], "is_causal", False)
    return AttentionArguments(query, key, value, bool(causal), args[0] if backward else None, mask, kwargs.get("scale"))


def _attention(kind: str) -> Callable[[Arguments, Mapping[str, Any], Any], int]:
    def count(args: Arguments, kwargs: Mapping[str, Any], result: Any) -> int:
        found = attention_arguments(kind, args, kwargs)
        pairs = prod(map(int, found.query.shape[:-1])) * int(found.key.shape[-2])
        width, value_width = int(found.query.shape[-1]), int(found.value.shape[-1])
        # Scores, and values weighted by them; in backward the scores again, and the gradients of values and weights
        # (as wide as a value), of queries and keys.
        widths = 3 * width + 2 * value_width if kind in _BACKWARD else width + value_width
        return 2 * pairs * widths // (2 if found.causal else 1)

    return count


def _argument(args: Arguments, kwargs: Mapping[str, Any], place: int, name: str, default: Any) -> Any:
    return args[place] if place < len(args) else kwargs.get(name, default)


_FORWARD = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": 4,
    "aten::_scaled_dot_product_flash_attention": 4,
    "aten::_scaled_dot_product_efficient_attention": 6,
    "aten::_scaled_dot_product_cudnn_attention": 6,
    "aten::_scaled_dot_product_fused_attention_overrideable": 5,
}
"""Which argument of each kind of attention says whether it is causal."""
_BACKWARD = {
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": 7,
    "aten::_scaled_dot_product_flash_attention_backward": 11,
    "aten::_scaled_dot_product_efficient_attention_backward": 11,
    "aten::_scaled_dot_product_cudnn_attention_backward": 14,
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": 13,
}
_MASK = {
    "aten::_scaled_dot_product_efficient_attention": 3,
    "aten::_scaled_dot_product_efficient_attention_backward": 4,
    "aten::_scaled_dot_product_cudnn_attention": 3,
    "aten::_scaled_dot_product_cudnn_attention_backward": 8,
    "aten::_scaled_dot_product_fused_attention_overrideable": 3,
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": 4,
}
"""Where it is given a mask."""
_PRODUCTS = {
    "aten::mm": (0, 1), "aten::bmm": (0, 1), "aten::mv": (0, 1), "aten::dot": (0, 1), "aten::_scaled_mm": (0, 1),
    "aten::_int_mm": (0, 1), "aten::addmm": (1, 2), "aten::_addmm_activation": (1, 2), "aten::baddbmm": (1, 2),
    "aten::addbmm": (1, 2), "aten::addmv": (1, 2), "aten::addmm_": (1, 2), "aten::baddbmm_": (1, 2),
    "aten::addbmm_": (1, 2), "aten::addmv_": (1, 2),
}  # fmt: skip
"""Where each kind of product has its sides."""

_COUNTS: dict[str, Callable[[Arguments, Mapping[str, Any], Any], int]] = {
    **{kind: _product(*sides) for kind, sides in _PRODUCTS.items()},
    "aten::linear": _linear,
    "aten::_grouped_mm": _grouped,
    "aten::_scaled_grouped_mm": _grouped,
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    **{kind: _attention(kind) for kind in (*_FORWARD, *_BACKWARD)},
}

ATTENTION = frozenset({*_FORWARD, *_BACKWARD})
"""Kinds of attention, both ways."""
MATMUL = frozenset(_COUNTS) - ATTENTION
"""Kinds whose time is that of matrix products."""


# Devices.

_FAMILIES: dict[str, Family] = {
    "a100": "cuda", "a100-40": "cuda", "h100": "cuda", "h200": "cuda", "b200": "cuda", "gb200": "cuda",
    "l40s": "cuda", "rtx4090": "cuda", "rtx5090": "cuda", "cuda": "cuda",
    "mi300x": "rocm", "mi355x": "rocm", "rocm": "rocm",
    "910b": "npu", "910c": "npu", "npu": "npu", "gaudi": "hpu", "hpu": "hpu", "cpu": "cpu",
}  # fmt: skip


def family_of(device: str) -> Family:
    """The family of a device by its name.

    >>> family_of("h100"), family_of("910b"), family_of("something")
    ('cuda', 'npu', 'other')
    """
    return _FAMILIES.get(device, "other")

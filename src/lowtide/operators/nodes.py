"""What a node of autograd's graph tells of the call that made it: the function, and all that it was given.

The node of a product has saved both factors, that of a SiLU its input. So what such a call gave can be had again from
its node, though nobody listened to the call: the node is of this very call, and what is no tensor among the arguments
stands in it as well. Most functions save less than they were given, and are not among these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lowtide._torch_private import GeluBackward, MulBackward, SiluBackward, saved_operand, saved_operands, silu
from lowtide.operators.kept import Kept

__all__ = ["NodeCall", "read_node"]

NodeCall: TypeAlias = tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]]
"""A function, what autograd holds in place of each tensor that it was given, and what else it was given."""


class _Form(NamedTuple):
    """How to read a class of nodes."""

    function: Callable[..., Tensor]
    operands: Callable[[Any, Callable[[Any], Tensor]], tuple[Any, ...]]
    options: tuple[str, ...] = ()


_FORMS = {
    GeluBackward: _Form(torch.nn.functional.gelu, saved_operand, ("approximate",)),
    MulBackward: _Form(torch.mul, saved_operands),
    SiluBackward: _Form(silu, saved_operand),
}
_NO_OPTIONS: dict[str, Any] = {}


def read_node(tensor: Tensor, unpack: Callable[[Any], Tensor]) -> NodeCall | None:
    """The call that made ``tensor``, if its node has saved, through ``unpack``, all that the call was given.

    None as well if somebody wrote to the tensor or to what was given: then the call's value is another one.
    """
    node = tensor.grad_fn
    form = _FORMS.get(type(node))
    if form is None or tensor._version or type(tensor) is not Tensor:  # a call in place counts as a write
        return None
    function, read, names = form
    operands = read(node, unpack)
    for operand in operands:
        held = operand.kept if type(operand) is Kept else operand
        if type(held) is Tensor:
            if held._version:
                return None
        elif held is None or isinstance(held, Tensor) or getattr(held, "written", False):
            return None
    options = {name: getattr(node, f"_saved_{name}") for name in names} if names else _NO_OPTIONS
    return (function, operands, options) if operands else None

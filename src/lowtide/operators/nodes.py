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

from lowtide._torch_private.nodes import (
    GeluBackward,
    MulBackward,
    SiluBackward,
    given_operand,
    given_operands,
    saved_operand,
    saved_operands,
    silu,
)
from lowtide.operators.kept import Kept

__all__ = ["NodeCall", "NodeForm", "form_of", "read_node"]

NodeCall: TypeAlias = tuple[Callable[..., Tensor], tuple[Any, ...], dict[str, Any]]
"""A function, what autograd holds in place of each tensor that it was given, and what else it was given."""


class NodeForm(NamedTuple):
    """How to read a class of nodes."""

    function: Callable[..., Tensor]
    held: Callable[[Any, Callable[[Any], Tensor]], tuple[Any, ...]]
    """What hooks gave in place of each tensor that the call was given."""
    given: Callable[[Any], tuple[Tensor, ...]]
    """The tensors themselves."""
    names: tuple[str, ...] = ()
    """What else the call was given."""

    def options(self, node: Any) -> dict[str, Any]:
        """What the call was given that is no tensor."""
        return {name: getattr(node, f"_saved_{name}") for name in self.names} if self.names else _NO_OPTIONS


_FORMS = {
    GeluBackward: NodeForm(torch.nn.functional.gelu, saved_operand, given_operand, ("approximate",)),
    MulBackward: NodeForm(torch.mul, saved_operands, given_operands),
    SiluBackward: NodeForm(silu, saved_operand, given_operand),
}
_NO_OPTIONS: dict[str, Any] = {}


def read_node(tensor: Tensor, unpack: Callable[[Any], Tensor]) -> NodeCall | None:
    """The call that made ``tensor``, if its node has saved, through ``unpack``, all that the call was given.

    None as well if somebody wrote to the tensor or to what was given: then the call's value is another one.
    """
    node = tensor.grad_fn
    form = form_of(node)
    if form is None or tensor._version or type(tensor) is not Tensor:  # a call in place counts as a write
        return None
    operands = form.held(node, unpack)
    for operand in operands:
        held = operand.kept if type(operand) is Kept else operand
        if type(held) is Tensor:
            if held._version:
                return None
        elif held is None or isinstance(held, Tensor) or getattr(held, "written", False):
            return None
    return (form.function, operands, form.options(node)) if operands else None


def form_of(node: Any) -> NodeForm | None:
    """How to read a node; None if it does not save all that its call was given."""
    return _FORMS.get(type(node))

"""The nodes of autograd's graph, and what they saved."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from lowtide._torch_private.modes import DisableTorchFunction, function_modes
from lowtide._torch_private.needed import needed_for

with needed_for("reading autograd's graph"):
    from torch._C._autograd import SavedTensor, _get_sequence_nr
    from torch._C._nn import silu

__all__ = [
    "GeluBackward",
    "MulBackward",
    "SiluBackward",
    "given_operand",
    "given_operands",
    "is_cast",
    "is_own_output",
    "node_number",
    "node_sequence",
    "raw_saved",
    "saved_operand",
    "saved_operands",
    "saved_slots",
    "silu",
    "without_graph",
]


with needed_for("reading calls from autograd's nodes"):
    GeluBackward, MulBackward, SiluBackward = (
        getattr(torch._C._functions, f"{name}Backward0") for name in ("Gelu", "Mul", "Silu")
    )
"""The classes of nodes that a GELU, a product of tensors and a SiLU leave in the graph."""


def is_cast(tensor: Tensor, source: Tensor) -> bool:
    """Whether a tensor, or what it is a view of, is known to autograd as a cast of another, whatever its shape."""
    node = (tensor if tensor._base is None else tensor._base).grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    return _before_views(node.next_functions[0][0]) is _before_views(source.grad_fn)


def _before_views(node: Any) -> Any:
    """The node that made what views, which keep the numbers and their order, see in another shape."""
    while node is not None and node.name() in ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"):
        node = node.next_functions[0][0]
    return node


def without_graph(tensor: Tensor) -> Tensor:
    """The tensor without the graph that made it, unseen by function modes.

    A node that saves its own output through hooks must not hold the output itself: the output holds the node, and if
    the graph is dropped instead of being run, nothing finds that circle.
    """
    if type(tensor) is Tensor and not function_modes():
        return tensor.detach()
    with DisableTorchFunction():
        return tensor.detach()


def saved_operand(node: Any, unpack: Callable[[Any], Tensor]) -> tuple[Any, ...]:
    """What autograd holds as the one argument of a node's call; nothing if that went through other hooks, or none."""
    saved = node._raw_saved_self
    return (saved.data,) if saved.unpack_hook is unpack else ()


def saved_operands(node: Any, unpack: Callable[[Any], Tensor]) -> tuple[Any, ...]:
    """As :func:`saved_operand` for a call with two, which are saved together; None in place of one that is not."""
    saved = node._raw_saved_self
    return (saved.data, node._raw_saved_other.data) if saved.unpack_hook is unpack else ()


def given_operand(node: Any) -> tuple[Tensor, ...]:
    """The one argument of a node's call, as autograd gives it back: it refuses one that was written to."""
    return (node._saved_self,)


given_operands: Callable[[Any], tuple[Tensor, ...]] = attrgetter("_saved_self", "_saved_other")
"""As :func:`given_operand` for a call with two."""


def saved_slots(node: Any) -> list[str]:
    """The names under which a node saves single tensors."""
    prefix = "_raw_saved_"
    names = [name.removeprefix(prefix) for name in dir(node) if name.startswith(prefix)]
    return [name for name in names if isinstance(raw_saved(node, name), SavedTensor)]


def raw_saved(node: Any, slot: str) -> Any:
    """What a node holds a tensor in: ``unpack_hook`` and ``data`` are what hooks gave it, if there were any."""
    return getattr(node, f"_raw_saved_{slot}")


def node_sequence(node: Any) -> int:
    """The number of a node of autograd's graph; those that a thread made later have higher ones."""
    number: int = node._sequence_nr()
    return number


def is_own_output(tensor: Tensor) -> bool:
    """Whether ``tensor``, which is just being saved, is saved by the very node that made it."""
    node: Any = tensor.grad_fn
    return node is not None and node_sequence(node) == node_number() - 1


node_number: Callable[[], int] = _get_sequence_nr
"""The number that the next node of autograd's graph gets on this thread."""

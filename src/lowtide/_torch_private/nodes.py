"""The nodes of autograd's graph.

``torch.autograd.graph.node_creation_hook`` (2.14) does not replace the numbers of nodes: it is called when a node has
saved all that it saves, and a pack hook has to know the node before that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lowtide._torch_private.modes import DisableTorchFunction, function_modes
from lowtide._torch_private.needed import needed_for

with needed_for("reading autograd's graph"):
    from torch._C._autograd import _get_sequence_nr

__all__ = [
    "is_cast",
    "is_own_output",
    "node_number",
    "node_sequence",
    "without_graph",
]


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


def node_sequence(node: Any) -> int:
    """The number of a node of autograd's graph; those that a thread made later have higher ones."""
    number: int = node._sequence_nr()
    return number


def is_own_output(tensor: Tensor) -> bool:
    """Whether ``tensor``, which is just being saved, is saved by the very node that made it."""
    node: Any = tensor.grad_fn
    return node is not None and node._sequence_nr() == node_number() - 1  # no call of ours: every saved tensor pays


node_number: Callable[[], int] = _get_sequence_nr
"""The number that the next node of autograd's graph gets on this thread."""

"""The backward that is running: its number, its current node, what is called when it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from lowtide._torch_private.needed import needed_for
from lowtide._torch_private.nodes import node_sequence

with needed_for("following backward"):
    from torch._C import _current_autograd_node, _current_graph_task_id, _will_engine_execute_node
    from torch._C import _set_grad_enabled as set_grad_enabled
    from torch._C._autograd import _get_current_graph_task_keep_graph

__all__ = [
    "at_end_of_backward",
    "backward_node_number",
    "current_backward",
    "current_node",
    "in_forward_mode",
    "keeps_graph",
    "leaves_out",
    "set_grad_enabled",
]


with needed_for("acting at the end of backward"):
    _queue_callback: Callable[[Callable[[], None]], None] = (
        torch.autograd.graph.queue_callback  # since 2.15
        if hasattr(torch.autograd.graph, "queue_callback")
        else torch.autograd.Variable._execution_engine.queue_callback
    )

current_backward: Callable[[], int] = _current_graph_task_id
"""A number for the backward that runs on this thread; -1 if none does."""

keeps_graph: Callable[[], bool] = _get_current_graph_task_keep_graph
"""Whether the backward that runs on this thread keeps its graph (``retain_graph=True``); True if none runs."""


def leaves_out(node: Any) -> bool:
    """Whether the backward that is running computes gradients for some of what a node leads to, but not for all."""
    for following, _ in node.next_functions:
        if following is not None:
            try:
                if not _will_engine_execute_node(following):
                    return True
            except RuntimeError:  # a leaf that ``torch.autograd.grad`` was asked for: torch does not say
                continue
    return False


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the backward that is running is over."""
    _queue_callback(callback)


def in_forward_mode() -> bool:
    """Whether tangents are computed now, by ``torch.func.jvp`` or by a dual level."""
    return forward_ad._current_level >= 0


def backward_node_number() -> int:
    """The number of the node that backward is running on this thread; -1 if it runs none."""
    node: Any = _current_autograd_node()
    return -1 if node is None else node_sequence(node)


def current_node() -> Any:
    """The node that backward is running on this thread, until what it gave has been added to what was there."""
    return _current_autograd_node()

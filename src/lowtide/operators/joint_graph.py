"""A joint graph of forward and backward, and what the forward graph that is split off it saves.

Each node has the operator that it belongs to in the ``custom`` entry of its ``meta``, as the marks in
:mod:`lowtide.runtime.graph` noted it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch_private.graphs import CUSTOM
from lowtide._torch_private.operators import is_operator, schema_of

if TYPE_CHECKING:
    from torch.fx import Graph, GraphModule, Node

__all__ = [
    "ENTRY",
    "cannot_be_drawn_again",
    "communicates",
    "copied",
    "entry_of",
    "is_cast",
    "is_random",
    "is_view",
    "mark",
    "recomputed_nodes",
    "saved_by",
    "saved_tensors",
    "size_of",
    "source_of",
    "tensors_of_node",
]

ENTRY = "lowtide"
"""Our entry in a node's ``custom`` entry: the layer's key, the number of its trace, and the operator."""


def copied(joint: GraphModule) -> GraphModule:
    """A copy that can be split; the tensors that it holds are the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, when it copies
        return torch.fx.GraphModule(joint, copy.deepcopy(joint.graph))


def entry_of(node: Node) -> tuple[str, int, str] | None:
    """What the marks noted at the node of Dynamo's graph from which this one was made."""
    found: tuple[str, int, str] | None = (node.meta.get(CUSTOM) or {}).get(ENTRY)
    return found


def communicates(node: Node) -> bool:
    """Whether it is a collective: its result is kept."""
    return is_operator(node.target) and "c10d" in str(getattr(node.target, "namespace", ""))


_DRAWN_AGAIN = {"cpu", "cuda", "hpu", "xpu"}
"""The devices on which torch can draw a compiled graph's random numbers a second time."""


def is_random(node: Node) -> bool:
    """Whether it draws random numbers."""
    return is_operator(node.target) and torch.Tag.nondeterministic_seeded in node.target.tags  # type: ignore[union-attr]


def cannot_be_drawn_again(node: Node) -> bool:
    """Whether it draws random numbers on a device where torch cannot repeat that: its result is kept."""
    return is_random(node) and not all(tensor.device.type in _DRAWN_AGAIN for tensor in tensors_of_node(node))


def recomputed_nodes(graph: Graph, wanted: Callable[[str, str], bool]) -> dict[Node, int]:
    """The nodes of forward whose values are recomputed, each with the number of its layer's trace: those of which
    ``wanted(key, operator)`` is true, for the layer's key and the operator whose value it is."""
    found: dict[Node, int] = {}
    late: set[Node] = set()
    for node in graph.nodes:
        if (node.op == "placeholder" and "tangents" in str(node.target)) or not late.isdisjoint(node.all_input_nodes):
            late.add(node)  # torch copies the entries to the nodes of backward
            continue
        source = source_of(node)
        owner = entry_of(source)
        if owner is None or communicates(source) or cannot_be_drawn_again(source):
            continue
        if wanted(owner[0], owner[2]):
            found[node] = owner[1]
    return found


def mark(recomputed: Mapping[Node, int]) -> None:
    """Have these nodes recomputed when their graph is split, as torch's own checkpoint does."""
    for node, instance in recomputed.items():
        node.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_RECOMPUTE
        node.meta["ac_graph_id"] = instance


def source_of(node: Node) -> Node:
    """The node that computed the value that this one has, looking through views, casts and parts of tuples."""
    while node.op == "call_function" and node.all_input_nodes and (is_view(node) or is_cast(node)):
        node = node.all_input_nodes[0]
    return node


def is_view(node: Node) -> bool:
    """Whether it has the storage of its first input, or is a part of a tuple."""
    target: Any = node.target
    if getattr(target, "__name__", "") == "getitem":
        return True
    if not is_operator(target):
        return False
    schema = schema_of(target)
    if schema.name in ("aten::_unsafe_view", "aten::detach", "aten::alias"):
        return True
    return any(returned.alias_info is not None and not returned.alias_info.is_write for returned in schema.returns)


def is_cast(node: Node) -> bool:
    """Whether it has its input's values in another dtype."""
    if not is_operator(node.target):
        return False
    casts = schema_of(node.target).name in ("aten::_to_copy", "prims::convert_element_type")
    return casts and bool(_dtype(node) != _dtype(node.all_input_nodes[0]))


def _dtype(node: Node) -> Any:
    return getattr(node.meta.get("val"), "dtype", None)


def saved_by(graph: Graph, outputs: int) -> list[Node]:
    """What a forward graph saves for backward, sizes and meshes included."""
    output = next(iter(reversed(graph.nodes)))
    found: list[Node] = list(output.args[0][outputs:])
    return found


def saved_tensors(graph: Graph, outputs: int) -> Iterator[Node]:
    """The tensors of these."""
    return (node for node in saved_by(graph, outputs) if isinstance(node.meta.get("val"), torch.Tensor))


def size_of(node: Node) -> int:
    """The bytes of what a node gives."""
    return sum(int(tensor.numel()) * tensor.element_size() for tensor in tensors_of_node(node))


def tensors_of_node(node: Node) -> list[torch.Tensor]:
    """What a node gives, as the tracer knows it."""
    value = node.meta.get("val")
    return [one for one in (value if isinstance(value, tuple | list) else (value,)) if isinstance(one, torch.Tensor)]

"""The kernels of a split graph: what a compiler that fuses makes of its nodes, and what of it is in memory.

[Note: fusion]
Matrix products, attention and what else has a kernel of its own is one kernel each. All other nodes join the nodes that
they read where no such kernel lies between, by counting on every path how many do; a reduction over any dimension but
the last ends a group too, since its result is needed in full before it is read. What only nodes of one group read is
never in memory. A group that has nodes of several operators is one kernel for each of them, so that one operator's can
be replayed alone: bytes that two operators read are counted for both.

Compilers fuse less than this where shapes differ, and more across reductions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from lowtide._torch_private.operators import is_operator, schema_of, tree_map
from lowtide.cost.kernels import ATTENTION, MATMUL, kernel_flops
from lowtide.cost.shape import shape_text
from lowtide.operators.joint_graph import communicates, is_view, size_of, tensors_of_node
from lowtide.trace.trace import Kernel
from lowtide.trace.traffic import bytes_read, computed_in

if TYPE_CHECKING:
    from torch.fx import Graph, Node

__all__ = ["Piece", "Pieces", "has_own_kernel", "pieces_of", "stored_in"]

FUSED = "compiled::fused"
"""The kind of a kernel that was made of several nodes."""


class Piece(NamedTuple):
    """One kernel."""

    operator: str
    kernel: Kernel
    reads: tuple[Node, ...]
    """The nodes whose storages it reads, placeholders included."""
    makes: tuple[Node, ...]
    """The nodes whose storages it makes."""
    nodes: tuple[Node, ...]


class Pieces(NamedTuple):
    """The kernels of a graph."""

    all: tuple[Piece, ...]
    """In order."""
    reads: Mapping[Node, tuple[Node, ...]]
    """What each node that computes reads, as the nodes whose storages those are."""
    own_kernel: frozenset[Node]
    """The nodes that are never part of another kernel."""


def stored_in(node: Node) -> Node:
    """The node that made the storage that this one's value is in."""
    while node.op == "call_function" and node.all_input_nodes and is_view(node):
        given = node.all_input_nodes[0]
        if _is_part(node) and not (given.op == "call_function" and is_view(given)):
            return node  # a part of what several tensors were made as
        node = given
    return node


def pieces_of(
    graph: Graph,
    operator_of: Callable[[Node], str],
    *,
    kept: Collection[Node],
    held: Collection[Node] = (),
    fuses: bool,
) -> Pieces:
    """The kernels of a graph. ``kept`` are storages that outlive it, or are handed out; ``held`` are made too, without
    being counted: another decision would hold them."""
    computing = [node for node in graph.nodes if node.op == "call_function" and _computes(node)]
    reads = {
        node: tuple(dict.fromkeys(stored_in(given) for given in node.all_input_nodes if tensors_of_node(given)))
        for node in computing
    }
    own = frozenset(node for node in computing if not fuses or has_own_kernel(node))
    groups = _groups(computing, reads, own)
    outside: dict[Node, bool] = dict.fromkeys(kept, True)
    for node in computing:
        for given in reads[node]:
            if groups.get(_maker(given)) is not groups[node]:
                outside[given] = True
    found: list[Piece] = []
    seen: set[tuple[Node, str, Node]] = set()
    run: list[Node] = []
    for node in computing:
        if run and (groups[run[0]] is not groups[node] or operator_of(run[0]) != operator_of(node)):
            _add(found, run, operator_of(run[0]), groups, reads, outside, held, own, seen)
            run = []
        run.append(node)
    if run:
        _add(found, run, operator_of(run[0]), groups, reads, outside, held, own, seen)
    return Pieces(tuple(found), reads, own)


def _add(
    found: list[Piece],
    run: list[Node],
    operator: str,
    groups: Mapping[Node, Node],
    reads: Mapping[Node, tuple[Node, ...]],
    outside: Mapping[Node, bool],
    held: Collection[Node],
    own: Collection[Node],
    seen: set[tuple[Node, str, Node]],
) -> None:
    """One kernel of neighbouring nodes of one group and operator; none where it reads and makes nothing in memory."""
    group = groups[run[0]]
    given = dict.fromkeys(one for node in run for one in reads[node] if groups.get(_maker(one)) is not group)
    made = [value for node in run for value in _values(node)]
    written = [value for value in made if outside.get(value) or run[0] in own]
    makes = [value for value in made if value in written or value in held]
    fresh = [one for one in given if (group, operator, one) not in seen]
    seen.update((group, operator, one) for one in fresh)
    touched = sum(map(size_of, written))
    if run[0] in own:
        touched += sum(bytes_read(tensor) for one in run[0].all_input_nodes for tensor in tensors_of_node(one))
        kernel = _own_kernel(run[0], operator, touched)
    else:
        touched += sum(map(size_of, fresh))
        tensors = [tensor for one in (*given, *made) for tensor in tensors_of_node(one)]
        kernel = Kernel(FUSED, operator, computed_in(tensors), touched=touched)
    if touched or makes or kernel.flops:
        found.append(Piece(operator, kernel, tuple(given), tuple(makes), tuple(run)))


def _own_kernel(node: Node, operator: str, touched: int) -> Kernel:
    target: Any = node.target
    kind = schema_of(target).name if is_operator(target) else getattr(target, "__name__", str(target))
    args, kwargs = tree_map(_value, (node.args, dict(node.kwargs)))
    tensors = [tensor for one in node.all_input_nodes for tensor in tensors_of_node(one)] or tensors_of_node(node)
    return Kernel(
        kind,
        operator,
        computed_in(tensors),
        kernel_flops(kind, args, kwargs, node.meta.get("val")),
        touched,
        shape_text(args, kwargs),
    )


def _value(given: Any) -> Any:
    return given.meta.get("val") if hasattr(given, "meta") and not isinstance(given, Tensor) else given


def _groups(
    computing: list[Node], reads: Mapping[Node, tuple[Node, ...]], own: Collection[Node]
) -> Mapping[Node, Node]:
    """For each node the first one of its group. See [Note: fusion]."""
    levels: dict[Node, int] = {}
    first: dict[Node, Node] = {node: node for node in computing}

    def group_of(node: Node) -> Node:
        while first[node] is not node:
            first[node] = node = first[first[node]]
        return node

    for node in computing:
        makers = [maker for maker in map(_maker, reads[node]) if maker in levels]
        levels[node] = max((levels[maker] + (maker in own or _ends_group(maker)) for maker in makers), default=0)
        for maker in makers:
            if not (node in own or maker in own or _ends_group(maker)) and levels[maker] == levels[node]:
                one, other = group_of(maker), group_of(node)
                first[other] = one
    return {node: group_of(node) for node in computing}


def _maker(value: Node) -> Node:
    """The node that computes a storage."""
    return value.all_input_nodes[0] if _is_part(value) and value.all_input_nodes else value


def _values(node: Node) -> list[Node]:
    """One node for each storage that a node makes."""
    if isinstance(node.meta.get("val"), Tensor):
        return [node]
    return [user for user in node.users if _is_part(user) and tensors_of_node(user)]


def _is_part(node: Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _computes(node: Node) -> bool:
    return bool(tensors_of_node(node)) and not is_view(node)


def has_own_kernel(node: Node) -> bool:
    """Whether a compiler that fuses leaves a node a kernel of its own; torch's partitioner does not compute it again
    unless it has to."""
    if not is_operator(node.target):
        return True
    name = schema_of(node.target).name
    space, _, short = name.partition("::")
    if space not in ("aten", "prims", "inductor_prims") or communicates(node):
        return True
    return name in MATMUL or name in ATTENTION or any(word in short for word in _APART)


_APART = (
    "sort", "topk", "scatter", "index_put", "index_add", "cumsum", "cumprod", "nonzero", "bincount", "histc", "unique",
    "searchsorted", "embedding_dense_backward", "embedding_backward", "convolution", "batch_norm", "pool", "_mm", "fft",
    "linalg", "multinomial", "grid_sampler", "upsample", "attention", "rnn", "lstm", "gru", "masked_select",
)  # fmt: skip
"""Words in the names of operations that compilers do not fuse, or not well."""


def _ends_group(node: Node) -> bool:
    """Whether it reduces another dimension than the last."""
    target: Any = node.target
    if not is_operator(target) or schema_of(target).name.partition("::")[2] not in _REDUCTIONS:
        return False
    given = next((tensor for one in node.all_input_nodes for tensor in tensors_of_node(one)), None)
    if given is None:
        return False
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    chosen = [dims] if isinstance(dims, int) else list(dims) if isinstance(dims, list | tuple) else range(given.dim())
    return any(isinstance(one, int) and one not in (-1, given.dim() - 1) for one in chosen)


_REDUCTIONS = frozenset(
    ("sum", "mean", "var", "var_mean", "std", "amax", "amin", "prod", "logsumexp", "any", "all", "norm", "max", "min")
)

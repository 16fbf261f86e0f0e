"""The kernels of a split graph: what a compiler that fuses makes of its nodes, and what of it is in memory.

[Note: fusion]
Matrix products, attention and what else has a kernel of its own is one kernel each, and what it reads is in memory. So
is what outlives the graph, and what is reduced. Every other node is computed again by each kernel that reads it, from
what is in memory.

Kernels that compute what is in memory are made one if they have as many elements to go through and share what they
read, or one reads what the other makes, as long as no other kernel is between them; those that share most come first.
A reduction over any dimension but the last goes through its elements in another order, and joins only its like. What
only one such kernel reads of what it makes is never in memory.

In backward each of these is one kernel. In forward it is one for each of its operators, so that one operator's can be
replayed alone; what several of them read is counted for the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import combinations, groupby
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

__all__ = ["FUSED", "Piece", "Pieces", "has_own_kernel", "pieces_of", "stored_in"]

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
    apart: bool,
) -> Pieces:
    """The kernels of a graph. ``kept`` are storages that outlive it, or are handed out; ``held`` are made too, without
    being counted: another decision would hold them. ``apart`` says whether each operator's kernels are its own."""
    computing = {node: place for place, node in enumerate(graph.nodes) if _computes(node)}
    reads = {
        node: tuple(dict.fromkeys(stored_in(given) for given in node.all_input_nodes if tensors_of_node(given)))
        for node in computing
    }
    units = _units(reads, kept, fuses)
    groups = _groups(units)
    written = set(kept)
    for node, unit in units.items():
        written.update(given for given in unit.reads if groups.get(_maker(given)) is not groups[node])
    pieces = _Pieces(reads, written, held)
    for group in _in_order(units, groups):
        if units[group[0]].form is None:
            pieces.add_own_kernel(group[0], operator_of(group[0]))
            continue
        inside = sorted({one for node in group for one in units[node].nodes}, key=computing.__getitem__)
        runs = [(operator, list(run)) for operator, run in groupby(inside, operator_of)]
        pieces.add_fused(runs if apart else [(operator_of(group[0]), inside)])
    return Pieces(tuple(pieces.found), reads)


class _Form(NamedTuple):
    """What a kernel goes through."""

    elements: int
    reduced: int | None = None
    """How many are left of them, if it reduces."""
    by_columns: bool = False
    """Whether in the order of a reduction over a dimension that is not the last."""

    def with_other(self, other: _Form) -> _Form | None:
        """What a kernel goes through that does the work of both; None if none can."""
        alike = (self.elements, self.by_columns) == (other.elements, other.by_columns)
        if alike and (None in (self.reduced, other.reduced) or self.reduced == other.reduced):
            return self if other.reduced is None else other
        if other == _Form(self.reduced or 0):
            return self
        return other if self == _Form(other.reduced or 0) else None


class _Unit(NamedTuple):
    """What computes a value that is in memory, unless it is made one with others."""

    nodes: tuple[Node, ...]
    """It, and those that are computed again for it."""
    reads: tuple[Node, ...]
    """The storages that these read."""
    form: _Form | None
    """None for a kernel of its own."""


def _units(reads: Mapping[Node, tuple[Node, ...]], kept: Collection[Node], fuses: bool) -> dict[Node, _Unit]:
    """By the node that makes what is in memory."""
    own = {node for node in reads if not fuses or has_own_kernel(node)}
    in_memory = own | {_maker(given) for node in own for given in reads[node]} | set(map(_maker, kept))
    readers = Counter(_maker(given) for all_given in reads.values() for given in all_given)
    again: dict[Node, _Unit] = {}
    units: dict[Node, _Unit] = {}
    for node, all_given in reads.items():
        before = [again[maker] for maker in map(_maker, all_given) if maker in again]
        stored = [given for given in all_given if _maker(given) not in again]
        nodes = dict.fromkeys([*(one for unit in before for one in unit.nodes), node])
        given = dict.fromkeys([*(one for unit in before for one in unit.reads), *stored])
        unit = _Unit(tuple(nodes), tuple(given), None if node in own else _form(node))
        if node in in_memory or _is_reduction(node) or (len(given) > _MOST_READ and readers[node] > 1):
            units[node] = unit
        else:
            again[node] = unit
    return units


_MOST_READ = 4
"""Inductor keeps a value that is computed from more than this many others, where two kernels or more read it."""


def _groups(units: Mapping[Node, _Unit]) -> dict[Node, Node]:
    """For each unit the first one of those that it is made one with. See [Note: fusion]."""
    first = {node: node for node in units}
    forms = {node: unit.form for node, unit in units.items() if unit.form is not None}
    before: dict[Node, set[Node]] = {  # what has to run directly before a group
        node: {_maker(given) for given in unit.reads if _maker(given) in units} for node, unit in units.items()
    }

    def group_of(node: Node) -> Node:
        while first[node] is not node:
            first[node] = node = first[first[node]]
        return node

    def is_between(one: Node, other: Node) -> bool:
        """Whether another group has to run after one, and before the other."""
        waiting = [maker for maker in map(group_of, before[other]) if maker is not one]
        seen: set[Node] = set()
        while waiting:
            node = waiting.pop()
            if node is one:
                return True
            if node not in seen:
                seen.add(node)
                waiting += map(group_of, before[node])
        return False

    for pair in _sharing(units):
        one, other = map(group_of, pair)
        form = forms[one].with_other(forms[other])
        if one is not other and form is not None and not is_between(one, other) and not is_between(other, one):
            first[other], forms[one] = one, form
            before[one] = {maker for maker in map(group_of, before[one] | before[other]) if maker is not one}
    return {node: group_of(node) for node in units}


def _sharing(units: Mapping[Node, _Unit]) -> list[tuple[Node, Node]]:
    """The pairs of units that touch the same memory, those that share most first."""
    touching: dict[Node, list[Node]] = {}
    for node, unit in units.items():
        if unit.form is not None:
            for value in (*unit.reads, *_values(node)):
                touching.setdefault(value, []).append(node)
    shared: dict[tuple[Node, Node], int] = {}
    for value, nodes in touching.items():
        for pair in combinations(nodes, 2):
            shared[pair] = shared.get(pair, 0) + size_of(value)
    return sorted(shared, key=lambda pair: -shared[pair])


def _in_order(units: Mapping[Node, _Unit], groups: Mapping[Node, Node]) -> list[list[Node]]:
    """The groups, each after those that make what it reads."""
    members: dict[Node, list[Node]] = {}
    for node in units:
        members.setdefault(groups[node], []).append(node)
    found: dict[Node, list[Node]] = {}

    def add(group: Node) -> None:
        for node in members[group]:
            for maker in map(_maker, units[node].reads):
                if groups.get(maker, group) is not group and groups[maker] not in found:
                    add(groups[maker])
        found[group] = members[group]

    for group in members:
        if group not in found:
            add(group)
    return list(found.values())


class _Pieces:
    """Makes kernels of groups, in order."""

    def __init__(
        self, reads: Mapping[Node, tuple[Node, ...]], written: Collection[Node], held: Collection[Node]
    ) -> None:
        self.reads, self.written, self.held = reads, written, held
        self.found: list[Piece] = []
        self.made: set[Node] = set()

    def add_own_kernel(self, node: Node, operator: str) -> None:
        """A kernel of one node."""
        makes = _values(node)
        touched = sum(map(size_of, makes))
        touched += sum(bytes_read(tensor) for one in node.all_input_nodes for tensor in tensors_of_node(one))
        self.made.update(makes)
        self.found.append(
            Piece(operator, _own_kernel(node, operator, touched), self.reads[node], tuple(makes), (node,))
        )

    def add_fused(self, runs: Sequence[tuple[str, Sequence[Node]]]) -> None:
        """The kernels of one group, one for each operator and its nodes; none that touches and makes nothing."""
        inside = {node for _, run in runs for node in run}
        counted: set[Node] = set()
        for operator, run in runs:
            given = tuple(dict.fromkeys(one for node in run for one in self.reads[node] if _maker(one) not in inside))
            made = [value for node in run for value in _values(node) if value not in self.made]
            makes = [value for value in made if value in self.written or value in self.held]
            touched = sum(size_of(one) for one in given if one not in counted)
            touched += sum(size_of(value) for value in made if value in self.written)
            counted.update(given)
            self.made.update(makes)
            if touched or makes:
                tensors = [tensor for one in (*given, *made) for tensor in tensors_of_node(one)]
                kernel = Kernel(FUSED, operator, computed_in(tensors), touched=touched)
                self.found.append(Piece(operator, kernel, given, tuple(makes), tuple(run)))


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
    return node.op == "call_function" and bool(tensors_of_node(node)) and not is_view(node)


def has_own_kernel(node: Node) -> bool:
    """Whether a compiler that fuses leaves a node a kernel of its own; torch's partitioner does not compute it again
    unless it has to."""
    if not is_operator(node.target):
        return True
    name = schema_of(node.target).name
    space, _, short = name.partition("::")
    if space not in ("aten", "prims", "inductor_prims") or communicates(node):
        return True
    if short in ("slice_scatter", "select_scatter", "diagonal_scatter"):  # each element is one of the two inputs'
        return False
    return name in MATMUL or name in ATTENTION or any(word in short for word in _APART)


_APART = (
    "sort", "topk", "scatter", "index_put", "index_add", "cumsum", "cumprod", "nonzero", "bincount", "histc", "unique",
    "searchsorted", "embedding_dense_backward", "embedding_backward", "convolution", "batch_norm", "pool", "_mm", "fft",
    "linalg", "multinomial", "grid_sampler", "upsample", "attention", "rnn", "lstm", "gru", "masked_select",
)  # fmt: skip
"""Words in the names of operations that compilers do not fuse, or not well."""


def _is_reduction(node: Node) -> bool:
    return is_operator(node.target) and schema_of(node.target).name.partition("::")[2] in _REDUCTIONS


def _form(node: Node) -> _Form:
    made = max(tensor.numel() for tensor in tensors_of_node(node))
    given = next((tensor for one in node.all_input_nodes for tensor in tensors_of_node(one)), None)
    if given is None or not _is_reduction(node):
        return _Form(made)
    dims: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    chosen = [dims] if isinstance(dims, int) else list(dims) if isinstance(dims, list | tuple) else range(given.dim())
    others = [one for one in chosen if isinstance(one, int) and one not in (-1, given.dim() - 1)]
    return _Form(given.numel(), made, by_columns=bool(others))


_REDUCTIONS = frozenset(
    ("sum", "mean", "var", "var_mean", "std", "amax", "amin", "prod", "logsumexp", "any", "all", "norm", "max", "min")
)

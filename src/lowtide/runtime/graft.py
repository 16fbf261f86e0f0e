"""Recompute from autograd's nodes without hooks: what a node saved is replaced after the calls.

[Note: grafts]
Hooks are asked about every tensor that is saved while they stand, which costs more than all that is done with the few
that something becomes of. Where all that is decided is recomputed from nodes (:mod:`lowtide.operators.nodes`), nobody
need be asked: the graph has it all. So a module whose first run, with hooks, showed which nodes have saved what is to
go, runs without hooks from then on. When it has run, these nodes are reached from its output along the same edges, and
in them a ``Grafted`` takes the place of the tensor, which is free then. While the module runs it is held: that adds
nothing to a step's peak, since backward has the same tensors there, rebuilt, and gradients beside them.

Where a node is found says only which tensor goes. What is held instead is the node that made this very tensor: the one
at the end of the edge that the argument has which was saved, views looked through. It has the call's own arguments, and
autograd refuses those that were written to. Another number of nodes than the first time, a node of another class, a
tensor that was written to: then the module took another way, and is learnt again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from lowtide._torch_private.nodes import node_sequence, raw_saved, saved_slots
from lowtide.operators.nodes import NodeForm, form_of
from lowtide.runtime.ambient import Ambient
from lowtide.runtime.ledger import Ledger, Line
from lowtide.runtime.rebuild import Grafted, Repeated, SeenAs
from lowtide.runtime.saved import unpack
from lowtide.runtime.view import View

__all__ = ["Graft", "learn_graft", "put_on"]

Route: TypeAlias = tuple[int, ...]
"""The edges that lead to a node from the one that made the module's output."""


class _Slot(NamedTuple):
    """A saved tensor that is to be replaced. Nodes are known by their places in the order they are reached in."""

    holder: int
    """The node that saved it."""
    saved: str
    """The name of the tensor there."""
    raw: str
    """The name of what holds it."""
    maker: int
    """The node that made it."""
    form: NodeForm
    """How that node is read."""
    viewed: bool
    """Whether what is saved is a view of what was made."""
    same: int | None
    """An earlier slot that has the same value."""
    uses: int
    """How often it is asked for in backward: by each slot that has it, and by each call that is repeated from it."""
    line: Line


class Graft(NamedTuple):
    """Where in a module's part of the graph tensors are replaced."""

    nodes: int
    """How many the module makes."""
    first: type
    """The class of the one that made its output."""
    visits: tuple[tuple[int, tuple[tuple[int, type], ...]], ...]
    """The nodes to go on from, and the edges to follow there, with the classes of the nodes at their ends."""
    slots: tuple[_Slot, ...]
    """In the order in which they were saved: what is made of another comes after it."""


def put_on(graft: Graft, output: Any, nodes: int, ledger: Ledger, ambient: Ambient) -> bool:
    """Replace what is to be recomputed in the part of the graph that ends in ``output``.

    False if this is not the graph that was learnt. What was replaced until that was noticed is right all the same.
    """
    if nodes != graft.nodes or type(output) is not Tensor:
        return False
    node: Any = output.grad_fn
    if type(node) is not graft.first:
        return False
    reached: list[Any] = [node]
    made: list[Grafted] = []
    try:
        for start, edges in graft.visits:
            following = reached[start].next_functions
            for edge, kind in edges:
                node = following[edge][0]
                if type(node) is not kind:
                    return False
                reached.append(node)
        for holder, saved, raw, maker, form, viewed, same, uses, line in graft.slots:
            tensor = getattr(reached[holder], saved)  # autograd refuses one that was written to since it was saved
            if tensor._version:  # before that: the call would give another
                return False
            if same is None:
                grafted = Grafted(reached[maker], form, uses, line, ledger, ambient)
            elif reached[maker] is made[same].node:
                grafted = made[same]
            else:
                return False
            made.append(grafted)
            held = getattr(reached[holder], raw)
            if viewed:
                held.register_hooks(SeenAs(grafted, View.by(tensor)).instead_of, SeenAs.tensor)
            else:
                held.register_hooks(grafted.instead_of, Grafted.tensor)
    except (AttributeError, IndexError, RuntimeError):  # no tensor, an edge less, or one that was written to
        return False
    return True


class _Found(NamedTuple):
    """A slot of the first run, where hooks have replaced the tensor."""

    node: Any
    name: str
    repeated: Repeated
    viewed: bool


def learn_graft(output: Any, begin: int, end: int, makers: Mapping[Repeated, Any]) -> Graft | None:
    """Where the tensors are that hooks replaced in the nodes numbered from ``begin`` up to ``end``.

    ``makers`` are what replaced them and the nodes that made them. None if they are not all found from the output, or
    if it cannot be told which argument of a call one of them is.
    """
    if type(output) is not Tensor or output.grad_fn is None:
        return None
    routes, found = _look_through(output.grad_fn, begin, end)
    if {one.repeated for one in found} != set(makers):
        return None
    holders = [routes[one.node] for one in found]
    made: list[Route] = []
    wanted: set[Route] = {()}
    for one, holder in zip(found, holders, strict=True):
        maker = makers[one.repeated]
        way = _way(one.node, maker, one.viewed)
        if way is None:
            return None
        made.append((*holder, *way))
        # A call of two arguments has saved both if both have edges; one of one has an edge, or would have no node.
        arguments = len(maker.next_functions)
        ends = [holder, made[-1], *((*made[-1], edge) for edge in range(arguments) if arguments > 1)]
        wanted |= {route[:length] for route in ends for length in range(len(route) + 1)}
    places = {route: place for place, route in enumerate(sorted(wanted, key=lambda route: (len(route), route)))}
    readers = set(makers.values())  # the calls that are repeated
    slots: list[_Slot] = []
    for place, (one, holder, route) in enumerate(zip(found, holders, made, strict=True)):
        form = form_of(makers[one.repeated])
        assert form is not None
        alike = [other for other in found if other.repeated is one.repeated]
        slots.append(
            _Slot(
                places[holder],
                f"_saved_{one.name}",
                f"_raw_saved_{one.name}",
                places[route],
                form,
                one.viewed,
                same=next((at for at in range(place) if found[at].repeated is one.repeated), None),
                uses=len(alike) + sum(other.node in readers for other in alike),
                line=one.repeated.line,
            )
        )
    return Graft(end - begin, type(output.grad_fn), _visits(output.grad_fn, places), tuple(slots))


def _look_through(node: Any, begin: int, end: int) -> tuple[dict[Any, Route], list[_Found]]:
    """The nodes that are reached from one, how, and the slots in them, in the order in which they were saved."""
    routes: dict[Any, Route] = {node: ()}
    found: list[_Found] = []
    waiting = [node]
    for node in waiting:  # which grows
        for name in saved_slots(node):
            saved = raw_saved(node, name)
            held = saved.data if saved.unpack_hook is unpack else None
            repeated = held.source if isinstance(held, SeenAs) else held
            if isinstance(repeated, Repeated):
                found.append(_Found(node, name, repeated, viewed=held is not repeated))
        for edge, (following, _) in enumerate(node.next_functions):
            if following is not None and following not in routes and begin <= node_sequence(following) < end:
                routes[following] = (*routes[node], edge)
                waiting.append(following)
    return routes, sorted(found, key=lambda one: node_sequence(one.node))


def _visits(node: Any, places: Mapping[Route, int]) -> tuple[tuple[int, tuple[tuple[int, type], ...]], ...]:
    """How all these routes are gone at once; nodes are reached in their order."""
    nodes: dict[Route, Any] = {(): node}
    edges: dict[Route, list[tuple[int, type]]] = {}
    for *start, edge in list(places)[1:]:
        before = tuple(start)
        nodes[*before, edge] = nodes[before].next_functions[edge][0]
        edges.setdefault(before, []).append((edge, type(nodes[*before, edge])))
    return tuple((places[start], tuple(ends)) for start, ends in edges.items())


def _way(node: Any, maker: Any, viewed: bool) -> Route | None:
    """The way from a node to the one that made what it saved, if there is one only."""
    found: list[Route] = []
    for edge, (following, _) in enumerate(node.next_functions):
        way: Route = (edge,)
        while viewed and following is not None and following is not maker and len(following.next_functions) == 1:
            following = following.next_functions[0][0]  # a view has one argument
            way = (*way, 0)
        if following is maker:
            found.append(way)
    return found[0] if len(found) == 1 else None

"""The Part of a compiled layer, from its split joint graph.

[Note: a compiled layer as a Part]
What the forward graph saves is what the Part saves; its operators, names and neighbours are those of the eager layer.
The kernels of an operator's nodes are one call of it, or several where another's come between. What such a call needs
to be replayed is not what it read: the compiler rebuilds cheap values on its way. So its inputs are the nearest ones
that are saved, or that have a kernel of their own; if nothing saves one of these, it is held for the replay alone.
In addition there is what the graph saves when it is split with only this operator recomputed, and otherwise does not;
where fewer bytes are freed even so, such as by the state of a random generator, the rest is held as one more input.

A compiled function hands over what it saves when it has run, and frees what backward has used for the last time while
that runs. Gradients reach their parameters when it has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from torch import Tensor

from lowtide.operators.joint_graph import (
    cannot_be_drawn_again,
    communicates,
    entry_of,
    is_cast,
    is_random,
    saved_tensors,
    size_of,
    source_of,
    tensors_of_node,
)
from lowtide.trace.pieces import Piece, Pieces, has_own_kernel, pieces_of, stored_in
from lowtide.trace.trace import Call, Event, Kernel, Pack, Part, Value

if TYPE_CHECKING:
    from torch.fx import Graph, Node

__all__ = ["Role", "SplitGraph", "compiled_part", "owner_of", "saved_bytes"]

Role: TypeAlias = Literal["input", "parameter", "other"]
"""What a graph is given: the layer's input, a parameter or a buffer, or something from outside."""


class SplitGraph(NamedTuple):
    """A joint graph that was split."""

    forward: Graph
    backward: Graph
    outputs: int
    """How many outputs of ``forward`` are not saved for backward, but handed out."""
    roles: Mapping[str, Role]
    """Of the graph's inputs, by their names, in order."""
    fuses: bool


def operator_of(node: Node) -> str:
    """The operator that a node belongs to; casts belong to what they are of."""
    entry = entry_of(source_of(node)) or entry_of(node)
    return entry[2] if entry is not None else ""


def owner_of(node: Node, roles: Mapping[str, Role]) -> tuple[str, str]:
    """Whose value a saved node is, as a Pack has it: its source, and the operator."""
    source = source_of(node)
    if source.op == "placeholder":
        return {"input": "boundary", "parameter": "static"}.get(roles.get(source.name, "other"), "root"), ""
    entry = entry_of(source)
    return "operator", entry[2] if entry is not None else ""


def saved_bytes(split: SplitGraph) -> dict[tuple[str, str], int]:
    """The bytes that forward saves, each storage once, by whose they are; parameters and what is given aside."""
    found: dict[tuple[str, str], int] = {}
    for stored in dict.fromkeys(map(stored_in, saved_tensors(split.forward, split.outputs))):
        if stored.op == "placeholder" and split.roles.get(stored.name) != "input":
            continue
        owner = owner_of(stored, split.roles)
        found[owner] = found.get(owner, 0) + size_of(stored)
    return found


def compiled_part(
    part: Part, split: SplitGraph, added: Mapping[str, Iterable[str]], freed: Mapping[str, int] | None = None
) -> Part:
    """The eager layer's ``part`` as the compiled layer is. See [Note: a compiled layer as a Part].

    ``added`` are for each operator the nodes that are saved where it alone is recomputed, and otherwise not; ``freed``
    is how many bytes fewer are saved then.
    """
    made = _Builder(part, split, added, {}).part()
    more = {one.name: one.net - (freed or {}).get(one.name, one.net) for one in made.operators}
    more = {name: size for name, size in more.items() if size > 0}
    return _Builder(part, split, added, more).part() if more else made


class _Builder:
    """Numbers what a split graph has."""

    def __init__(
        self, part: Part, split: SplitGraph, added: Mapping[str, Iterable[str]], more: Mapping[str, int]
    ) -> None:
        self.eager, self.split, self.added = part, split, added
        self.more = dict(more)
        """The bytes that are held for an operator's replay besides its inputs, until its first call is met."""
        self.values: list[Value] = []
        self.kernels: list[Kernel] = []
        self.calls: list[Call] = []
        self.packs: list[Pack] = []
        self.numbers: dict[str, int] = {}
        """The value of each storage of forward, by the name of its node."""
        self.pack_of: dict[str, int] = {}
        """By the name of the saved node, which is the same in both graphs."""
        self.places = {one.name: place for place, one in enumerate(part.operators)}
        self.handed = [one for one in _outputs(split.forward)[: split.outputs] if _is_tensor(one)]
        self.saved: dict[Node, list[Node]] = {}
        """What is saved of each storage."""
        for node in saved_tensors(split.forward, split.outputs):
            self.saved.setdefault(stored_in(node), []).append(node)

    def part(self) -> Part:
        eager, values = self.eager, self.eager.values
        given = None
        if eager.input is not None:
            given = self._add_value(self._given("input"), values[eager.input])
        forward, output = self._forward(given)
        gradient, backward, passed = self._backward()
        return Part(
            name=eager.name,
            operators=tuple(
                one._replace(
                    owned=sum(self.values[number].size for number in owned),
                    net=sum(self.values[number].size for number in owned) - self._held_for(one.name),
                    repeatable=one.name not in self._never(),
                )
                for one in eager.operators
                for owned in [{pack.value for pack in self.packs if pack.owner == one.name}]
            ),
            values=tuple(self.values),
            kernels=tuple(self.kernels),
            calls=tuple(self.calls),
            packs=tuple(self.packs),
            forward=tuple(forward),
            backward=tuple(backward),
            input=given,
            output=output,
            output_gradient=gradient,
            input_gradient=passed,
            static=eager.static,
        )

    def _given(self, role: Role) -> str:
        return next((name for name, one in self.split.roles.items() if one == role), "")

    def _add_value(self, name: str, value: Value) -> int:
        self.numbers[name] = len(self.values)
        self.values.append(value)
        return self.numbers[name]

    def _held_for(self, operator: str) -> int:
        """The bytes that are held only for an operator's replay."""
        inputs = {number for call in self.calls if call.operator == operator for number in call.inputs}
        saved = {pack.value for pack in self.packs}
        return sum(self.values[number].size for number in inputs - saved)

    def _never(self) -> set[str]:
        """The operators that cannot be replayed."""
        nodes = [node for node in self.split.forward.nodes if node.op == "call_function"]
        return {operator_of(node) for node in nodes if communicates(node) or cannot_be_drawn_again(node)}

    # Forward.

    def _forward(self, given: int | None) -> tuple[list[Event], int | None]:
        graph, eager = self.split.forward, self.eager
        by_name = {node.name: node for node in graph.nodes}
        held = [by_name[name] for names in self.added.values() for name in names if name in by_name]
        kept = {*self.saved, *map(stored_in, self.handed)}
        found = pieces_of(graph, operator_of, kept=kept, held=held, fuses=self.split.fuses, apart=True)
        result, *others = map(stored_in, self.handed)
        events: list[Event] = []
        for node in graph.nodes:
            if node.op == "placeholder" and node in self.saved:
                self._save(node, events)
        nearest = [self._needs(piece, found, by_name) for piece in found.all]
        last = self._last_readers(found, nearest)
        open_call = -1
        operator = ""
        for place, piece in enumerate(found.all):
            if piece.operator != operator:
                if open_call >= 0:
                    events.append(("end", open_call))
                operator, open_call = piece.operator, -1
                if operator:
                    open_call = len(self.calls)
                    self.calls.append(Call(operator))
                    events += self._begin(open_call, self.more.pop(operator, 0))
            for node in piece.makes:
                value = Value(size_of(node), operator_of(node))
                if node is result and eager.output is not None:
                    value = eager.values[eager.output]._replace(size=value.size, owner=value.owner)
                elif node in others:
                    value = value._replace(until="forward")
                events.append(("make", self._add_value(node.name, value)))
            events.append(("run", self._kernel(piece)))
            if open_call >= 0:
                self.calls[open_call] = self._with_inputs(self.calls[open_call], nearest[place])
            for node in piece.makes:
                self._save(node, events)
            for node in last.get(place, ()):
                if node.name in self.numbers and node is not result and node not in others:
                    events.append(("free", self.numbers[node.name]))
        if open_call >= 0:
            events.append(("end", open_call))
        if given is not None and ("free", eager.input) in eager.forward:
            events.append(("free", given))
        return events, self.numbers.get(result.name)

    def _last_readers(self, found: Pieces, needed: Sequence[Iterable[Node]]) -> dict[int, list[Node]]:
        """For each piece the storages that nothing reads after it, nor holds for its replay."""
        last: dict[Node, int] = {}
        for place, (piece, more) in enumerate(zip(found.all, needed, strict=True)):
            for node in (*piece.makes, *piece.reads):
                if node.op == "call_function":
                    last[node] = place
            last.update((node, place) for node in more if node in last)
        gone: dict[int, list[Node]] = {}
        for node, place in last.items():
            gone.setdefault(place, []).append(node)
        return gone

    def _begin(self, call: int, more: int) -> list[Event]:
        """A call begins. What is held in addition for its replay is there in this moment, to be held."""
        if not more:
            return [("call", call)]
        number = len(self.values)
        self.values.append(Value(more))
        self.calls[call] = self.calls[call]._replace(inputs=(number,))
        return [("make", number), ("call", call), ("free", number)]

    def _kernel(self, piece: Piece) -> int:
        reads = tuple(self.numbers[node.name] for node in piece.reads if node.name in self.numbers)
        writes = tuple(self.numbers[node.name] for node in piece.makes if node.name in self.numbers)
        self.kernels.append(piece.kernel._replace(reads=reads, writes=writes))
        return len(self.kernels) - 1

    def _needs(self, piece: Piece, found: Pieces, by_name: Mapping[str, Node]) -> list[Node]:
        """What the replay of a piece needs; what is not alive then is not."""
        nearest = dict.fromkeys(one for node in piece.nodes for one in self._nearest(node, found, piece.operator))
        nearest |= dict.fromkeys(by_name[name] for name in self.added.get(piece.operator, ()) if name in by_name)
        return list(nearest)

    def _with_inputs(self, call: Call, needed: Iterable[Node]) -> Call:
        known = [(self.numbers[node.name], operator_of(node)) for node in needed if node.name in self.numbers]
        return Call(
            call.operator,
            tuple(dict.fromkeys((*call.inputs, *(number for number, _ in known)))),
            tuple(dict.fromkeys((*call.reads, *(name for _, name in known if name)))),
        )

    def _nearest(self, node: Node, found: Pieces, operator: str) -> list[Node]:
        """The nearest storages from which a node can be computed without another kernel than a fused one."""
        nearest: dict[Node, None] = {}
        waiting = list(found.reads[node])
        seen: set[Node] = set()
        while waiting:
            stored = waiting.pop()
            if stored in seen:
                continue
            seen.add(stored)
            maker = stored if stored in found.reads else next(iter(stored.all_input_nodes), stored)
            if stored.op == "placeholder":
                if self.split.roles.get(stored.name) == "input":
                    nearest[stored] = None
            elif operator_of(stored) == operator:
                pass
            elif stored in self.saved or maker not in found.reads or has_own_kernel(maker) or is_random(maker):
                nearest[stored] = None
            else:
                waiting += found.reads[maker]
        return list(nearest)

    def _save(self, stored: Node, events: list[Event]) -> None:
        """Autograd saves all that is saved of a storage."""
        for node in self.saved.get(stored, ()):
            source, owner = owner_of(node, self.split.roles)
            if stored.op == "placeholder" and (source != "boundary" or stored.name not in self.numbers):
                continue  # a parameter's, or there anyhow
            if source in ("static", "root"):
                source, owner = "operator", ""  # computed here from what is: nothing decides it
            number = self.numbers[stored.name]
            position = self.places.get(owner, self.packs[-1].position if self.packs else 0)
            self.pack_of[node.name] = len(self.packs)
            events.append(("save", len(self.packs)))
            movable = bool(owner) or source == "boundary"
            self.packs.append(Pack(number, operator_of(node), owner, source, position, movable, is_cast(stored)))  # type: ignore[arg-type]
            if source == "boundary" and stored.op != "placeholder":
                self.values[number] = self.values[number]._replace(source="boundary", owner="")

    # Backward.

    def _backward(self) -> tuple[int | None, list[Event], int | None]:
        graph, eager, roles = self.split.backward, self.eager, self.split.roles
        tangent = next((node for node in graph.nodes if node.op == "placeholder" and "tangents" in node.name), None)
        gradient = None
        self.numbers = {}  # the names of recomputed nodes are those of forward
        if tangent is not None and eager.output_gradient is not None:
            gradient = self._add_value(tangent.name, eager.values[eager.output_gradient])
        outputs = _outputs(graph)
        role = dict(zip((stored_in(one) if _is_tensor(one) else None for one in outputs), roles.values(), strict=False))
        if eager.input_gradient is None:  # what comes before the layer does not ask for it
            role = {node: one for node, one in role.items() if one != "input"}
        kept = {one for one in role if one is not None}
        found = pieces_of(graph, operator_of, kept=kept, fuses=self.split.fuses, apart=False)
        first, last = _users(found, self.pack_of)
        gone = self._last_readers(found, [()] * len(found.all))
        events: list[Event] = []
        passed = None
        for place, piece in enumerate(found.all):
            events += [("use", number) for number in first.get(place, ())]
            for node in piece.makes:
                value = Value(size_of(node), gradient=role.get(node) == "parameter")
                if role.get(node) == "input":
                    assert eager.input_gradient is not None
                    value = eager.values[eager.input_gradient]._replace(size=value.size)
                number = self._add_value(node.name, value)
                events.append(("make", number))
                if role.get(node) == "input":
                    passed = number
            events.append(("run", self._kernel(piece)))
            events += [("done", number) for number in last.get(place, ())]
            for node in gone.get(place, ()):
                if node.name in self.numbers and role.get(node) not in ("input", "parameter"):
                    events.append(("free", self.numbers[node.name]))
        used = {number for numbers in first.values() for number in numbers}
        for number in range(len(self.packs)):
            if number not in used:
                events += [("use", number), ("done", number)]
        if gradient is not None and ("free", eager.output_gradient) in eager.backward:
            events.append(("free", gradient))
        parameters = tuple(number for number, value in enumerate(self.values) if value.gradient)
        if parameters:
            # Parameters get their gradients when the whole graph has run.
            events.append(("run", len(self.kernels)))
            self.kernels.append(Kernel("aten::detach", writes=parameters))
        return gradient, events, passed


def _users(found: Pieces, packs: Mapping[str, int]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """For each piece the packs that it is the first to read, and those that it is the last to."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for place, piece in enumerate(found.all):
        for node in piece.reads:
            if node.op == "placeholder" and node.name in packs:
                first.setdefault(packs[node.name], place)
                last[packs[node.name]] = place
    turned: tuple[dict[int, list[int]], dict[int, list[int]]] = ({}, {})
    for places, by_place in zip((first, last), turned, strict=True):
        for number, place in places.items():
            by_place.setdefault(place, []).append(number)
    return turned


def _outputs(graph: Graph) -> list[Node]:
    """What a graph returns."""
    output = next(iter(reversed(graph.nodes)))
    found: list[Node] = list(output.args[0])
    return found


def _is_tensor(node: Node | None) -> bool:
    return node is not None and bool(tensors_of_node(node)) and isinstance(node.meta.get("val"), Tensor)

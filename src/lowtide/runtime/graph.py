"""Decide the operators of layers that ``torch.compile`` compiles: torch's partitioner is given what to recompute.

[Note: how a decision reaches the partitioner]
A layer with decisions calls :func:`mark_begin` and :func:`mark_end` while Dynamo traces it, by Dynamo's ``comptime``,
which leaves nothing in the compiled code. The second one has the layer's part of Dynamo's graph, names its operators,
resolves the Policy, and notes each operator in the ``custom`` entry of its nodes, which torch copies to all that it
makes of them. The first one wraps the backend for this one graph, so that the joint graph passes through :func:`_split`
before it is split: there the nodes of recomputed operators are marked as torch's own checkpoint marks them, and what
is saved is read off the result.

Views and casts belong to what they are of, as in eager mode. A kept operator is left to the compiler, which may still
recompute what costs nothing; with nothing decided the graph is the one that it was.

The layer's key, which is made of its decisions and the names of its modules, is a constant of the traced function:
Dynamo guards it, so that layers with equal decisions share one graph and no graph is used for another decision.

If the graph breaks inside a layer, its operators are not all in the graph that the second mark sees. That is refused
for decisions by operator. A layer that is recomputed as a whole goes back to torch's checkpoint, which then runs
between the graphs; the pieces of the layer are compiled as they would be without it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import count
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, WeakMethod

import torch
from torch import nn

from lowtide._torch_private.compiled import is_dynamo_compiling
from lowtide._torch_private.graphs import (
    CUSTOM,
    Backend,
    Partitioner,
    call_while_traced,
    drop_guards,
    graph_of,
    key_of,
    partitioned_by,
    through_dynamo,
    without_graph_cache,
    wrap_backend,
)
from lowtide.errors import PolicyError
from lowtide.operators.graph_calls import ModulePlace, catalogue_of, module_places, name_calls
from lowtide.operators.joint_graph import (
    ENTRY,
    copied,
    entry_of,
    mark,
    recomputed_nodes,
    saved_by,
    saved_tensors,
    size_of,
    source_of,
)
from lowtide.operators.wrappers import Function
from lowtide.policy import Catalogue, Decision, LayerPolicy, Operator, Policy, Recompute, Swap, resolve

if TYPE_CHECKING:
    from torch.fx import Graph, GraphModule, Node

__all__ = ["GraphBytes", "GraphLayer"]


class GraphBytes(NamedTuple):
    """What one compiled layer holds for backward, by operator."""

    undecided: Mapping[str, int]
    """What the compiler would have it hold."""
    held: Mapping[str, int]
    """What it holds."""
    inputs: int = 0
    """The bytes that the recomputed operators read of others, and that the compiler would not have it hold: at most
    these are held in addition."""

    def freed(self, operators: Iterable[str] | None = None) -> int:
        """What the decisions for these operators free; None: for all."""
        names = {*self.undecided, *self.held} if operators is None else operators
        return sum(self.undecided.get(name, 0) - self.held.get(name, 0) for name in names)


class SavedValue(NamedTuple):
    """A tensor that a compiled layer saves for backward."""

    operator: str
    """Whose value it is; empty if it comes from outside, or from parameters."""
    shape: tuple[int | None, ...]
    """None where it is not always the same."""
    dtype: torch.dtype

    def is_like(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor can be this one."""
        same = len(self.shape) == tensor.dim() and tensor.dtype is self.dtype
        return same and all(
            known is None or known == size for known, size in zip(self.shape, tensor.shape, strict=True)
        )


class GraphLayer:
    """The decisions for layers of one structure, as they are carried out in compiled graphs."""

    def __init__(self, key: str, settings: LayerPolicy, policy: Policy) -> None:
        self.key, self.settings = key, settings
        self.policy = Policy((settings,), origin=policy.origin)
        self.modules: dict[int, ModulePlace] = {}
        self.catalogue: tuple[Operator, ...] | None = None
        """All operators that such layers had in a trace; None until one was traced."""
        self.decisions: Mapping[str, Decision] = {}
        self.bytes: list[GraphBytes] = []
        """What each layer of the last graph holds, in the order they run; empty until one was split."""
        self.saved: list[tuple[SavedValue, ...]] = []
        """What each graph of one such layer saves, in order."""
        self.on_traced: list[WeakMethod[Callable[[], None]]] = []
        """Called when it was traced; may raise. A Handle that nothing refers to must not live on for these."""
        self.on_break: list[WeakMethod[Callable[[], None]]] = []
        """Called when the graph breaks inside a layer that is recomputed as a whole."""

    @staticmethod
    def of(layer: nn.Module, settings: LayerPolicy, policy: Policy) -> GraphLayer:
        """The decisions for a layer, together with those that are alike."""
        names = [f"{name}:{type(module)!r}" for name, module in layer.named_modules()]
        text = "\n".join([repr(settings), policy.origin, *names])
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        found = _LAYERS.get(key)
        if found is None:
            found = _LAYERS[key] = GraphLayer(key, settings, policy)
        found.modules.update(module_places(layer))
        return found

    @staticmethod
    def swaps(settings: LayerPolicy) -> bool:
        """Whether a layer swaps anything, which no graph can: hooks around the compiled layer do."""
        decisions = (settings.default, settings.boundary, *(rule.decision for rule in settings.rules))
        return any(isinstance(decision, Swap) for decision in decisions)

    def traceable(self, forward: Function, otherwise: Function) -> Function:
        """``forward`` with the marks while Dynamo traces it; ``otherwise`` when it does not."""
        key = self.key

        def compiled_or_eager(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                call_while_traced(mark_begin, key)
                output = forward(*args, **kwargs)
                call_while_traced(mark_end, key)
                return output
            return otherwise(*args, **kwargs)

        return self._own_code(compiled_or_eager)

    def _own_code(self, function: Any) -> Function:
        """The function with a code object of its own for each key: Dynamo counts recompilations by code objects."""
        code = _CODES.setdefault(self.key, function.__code__.replace(co_name=f"lowtide_{self.key}"))
        return FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)

    def unsubscribe(self, call: Callable[[], None]) -> None:
        """Call it no more."""
        for methods in (self.on_traced, self.on_break):
            methods[:] = [method for method in methods if method() != call]

    def recomputes(self, operator: str) -> bool:
        """Whether what an operator computes is recomputed; in a layer that is as a whole, that is everything."""
        return self.settings.recomputed_as_a_whole or isinstance(self.decisions.get(operator), Recompute)

    def traced(self, names: Mapping[Node, str]) -> None:
        """Dynamo has traced such a layer; others may have other operators, by a setting of theirs."""
        operators = catalogue_of(names)
        resolution = resolve(self.policy, Catalogue((operators,)), require_match=False)
        self.decisions = {**self.decisions, **resolution.layers[0].decisions}
        known = {one.name for one in self.catalogue or ()}
        self.catalogue = (*(self.catalogue or ()), *(one for one in operators if one.name not in known))
        _call_all(self.on_traced)


def _call_all(methods: list[WeakMethod[Callable[[], None]]]) -> None:
    for method in list(methods):
        if (call := method()) is not None:
            call()
        else:
            methods.remove(method)


_LAYERS: dict[str, GraphLayer] = {}
"""By key. Compiled code outlives a Handle, and what is known of it is needed when the same Policy is applied again."""
_CODES: dict[str, CodeType] = {}


class _Mark(NamedTuple):
    """A layer whose trace has begun."""

    key: str
    last: Node | None
    """The last call in the graph until then."""


_OPEN: WeakKeyDictionary[Graph, list[_Mark]] = WeakKeyDictionary()
_INSTANCES = count(1)
"""Numbers each trace of a layer, in the order they run; torch's checkpoint numbers its regions likewise."""


_TRACED_NAMES = ("is_dynamo_compiling", "call_while_traced", "mark_begin", "mark_end")
"""What a traceable function reads of this module, and no other code changes: a guard of each would be checked in every
call."""


def mark_begin(context: Any) -> None:
    """A layer is about to be traced."""
    if not torch.is_grad_enabled():
        return
    graph = graph_of(context)
    last = next((node for node in reversed(graph.nodes) if _is_call(node)), None)
    _OPEN.setdefault(graph, []).append(_Mark(key_of(context), last))
    wrap_backend(context, _deciding)


def mark_end(context: Any) -> None:
    """A layer has been traced."""
    drop_guards(context, globals(), _TRACED_NAMES)
    if not torch.is_grad_enabled():
        return
    graph, key = graph_of(context), key_of(context)
    open_marks = _OPEN.get(graph, [])
    if not open_marks or open_marks[-1].key != key:
        _broken(key)
        return
    layer, mark = _LAYERS[key], open_marks.pop()
    calls: list[Node] = []
    for node in reversed(graph.nodes):
        if node is mark.last:
            break
        if _is_call(node):  # the graph's inputs are put in front of it as they are met
            calls.append(node)
    calls.reverse()
    names = name_calls(calls, layer.modules)
    try:
        layer.traced(names)
    except PolicyError as error:
        raise through_dynamo(error) from None
    instance = next(_INSTANCES)
    for node in calls:
        entry = (key, instance, names.get(node, ""))
        node.meta[CUSTOM] = {**node.meta.get(CUSTOM, {}), ENTRY: entry}


def _broken(key: str) -> None:
    """The graph broke inside a layer: its first operators were compiled before, without their decisions."""
    layer = _LAYERS[key]
    if layer.settings.recomputed_as_a_whole:
        _call_all(layer.on_break)
        return
    raise through_dynamo(
        PolicyError(
            "torch.compile breaks its graph inside a layer whose operators are to be decided, so that they are not in"
            " one graph; TORCH_LOGS=graph_breaks shows where; mend that, or recompute the layer as a whole"
        )
    )


def _is_call(node: Node) -> bool:
    return node.op in ("call_function", "call_method")


# From here on: the joint graph.


def _deciding(backend: Backend) -> Backend:
    """A backend that compiles a graph with decided layers."""

    def deciding(graph: Any, inputs: Any, **settings: Any) -> Any:
        reached: list[Partitioner] = []

        def wrap(partitioner: Partitioner) -> Partitioner:
            reached.append(partitioner)
            return partial(_split, partitioner)

        with without_graph_cache(), partitioned_by(wrap):
            compiled = backend(graph, inputs, **settings)
        if not reached:
            name = getattr(backend, "__name__", type(backend).__name__)
            raise through_dynamo(
                PolicyError(
                    f"the backend {name} of torch.compile does not split a joint graph with torch's aot_autograd,"
                    " which is given the decisions for operators; use one that does, such as inductor or aot_eager"
                )
            )
        return compiled

    return deciding


def _split(partitioner: Partitioner, joint: GraphModule, inputs: Any, *args: Any, **settings: Any) -> tuple[Any, Any]:
    """Split a joint graph as decided, and note what its layers hold."""
    outputs = settings["num_fwd_outputs"]
    recomputed = _recomputed(joint)
    undecided: dict[int, dict[str, int]] | None = None
    read: dict[int, int] = {}
    if recomputed:
        copy = copied(joint)
        forward, _ = partitioner(copy, inputs, *args, **settings)
        undecided = _held(forward.graph, outputs)
        # From the copy: values that are equal, such as the mask of each layer, are one by now.
        read = _read(_recomputed(copy), {source_of(node).name for node in saved_tensors(forward.graph, outputs)})
        mark(recomputed)
    forward, backward = partitioner(joint, inputs, *args, **settings)
    if recomputed and torch.__version__ < "2.14" and any(_is_opaque(node) for node in saved_by(forward.graph, outputs)):
        raise through_dynamo(
            PolicyError(
                f"torch {torch.__version__} cannot recompute in a compiled layer whose parameters are DTensors;"
                " its own checkpoint fails likewise, and torch 2.14 can: swap, do not compile, or use that"
            )
        )
    held = _held(forward.graph, outputs)
    found: dict[str, list[GraphBytes]] = {}
    for key, instance in sorted({entry[:2] for node in joint.graph.nodes if (entry := entry_of(node))}, key=_second):
        before = (held if undecided is None else undecided).get(instance, {})
        found.setdefault(key, []).append(GraphBytes(before, held.get(instance, {}), read.get(instance, 0)))
    for key, all_bytes in found.items():
        layer = _LAYERS[key]
        layer.bytes = all_bytes
        order = tuple(map(_saved_value, saved_tensors(forward.graph, outputs)))
        if len(found) == len(all_bytes) == 1 and order not in layer.saved:
            layer.saved.append(order)
    return forward, backward


def _recomputed(joint: GraphModule) -> dict[Node, int]:
    return recomputed_nodes(joint.graph, lambda key, operator: _LAYERS[key].recomputes(operator))


def _second(pair: tuple[str, int]) -> int:
    return pair[1]


def _read(recomputed: Mapping[Node, int], held: set[str]) -> dict[int, int]:
    """The bytes that recomputed nodes read of others, and that are not ``held``, by the number of the layer's trace."""
    sources: dict[Node, int] = {}
    for node, instance in recomputed.items():
        for given in map(source_of, node.all_input_nodes):
            own = recomputed.get(given) == instance
            if given.op == "call_function" and not own and given.name not in (() if given in recomputed else held):
                sources.setdefault(given, instance)
    found: dict[int, int] = {}
    for source, instance in sources.items():
        found[instance] = found.get(instance, 0) + size_of(source)
    return found


def _held(graph: Graph, outputs: int) -> dict[int, dict[str, int]]:
    """What the forward graph saves for backward: the bytes of each operator, by the number of its layer's trace."""
    found: dict[int, dict[str, int]] = {}
    for source in dict.fromkeys(source_of(node) for node in saved_tensors(graph, outputs)):
        entry = entry_of(source)
        if entry is not None and source.op != "placeholder":
            _, instance, name = entry
            operators = found.setdefault(instance, {})
            operators[name] = operators.get(name, 0) + size_of(source)
    return found


def _is_opaque(node: Node) -> bool:
    """Whether it is an object that is no tensor and no number, such as a mesh."""
    return not isinstance(node.meta.get("val"), torch.Tensor | int | float | bool | torch.SymInt)


def _saved_value(node: Node) -> SavedValue:
    source, value = source_of(node), node.meta["val"]
    entry = entry_of(source) if source.op != "placeholder" else None
    shape = tuple(size if isinstance(size, int) else None for size in value.shape)
    return SavedValue(entry[2] if entry is not None else "", shape, value.dtype)

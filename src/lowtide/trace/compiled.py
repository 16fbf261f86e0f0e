"""Price the layers of a model as ``torch.compile`` has them.

A model is traced in eager mode. Of each kind of layer that is compiled, the joint graph of forward and backward is
taken from the backend, before it is compiled any further, and split as the backend would; that replaces the layer in
the Trace. Nothing is computed: the layer is traced with tensors of the right form. What runs outside the layers stays
as in eager mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lowtide._torch_private.autocast import AutocastState, autocast_contexts, autocast_state
from lowtide._torch_private.compiled import default_stance, is_compiled, uncompiled
from lowtide._torch_private.fake import FakeTensor, unset_fake_temporarily
from lowtide._torch_private.graphs import JointGraph, compiled_alike, joint_graph
from lowtide._torch_private.modules import buffers_of, parameters_of
from lowtide._torch_private.operators import tree_map
from lowtide.operators.calls import tensors_of
from lowtide.operators.joint_graph import copied, entry_of, mark, recomputed_nodes, saved_tensors
from lowtide.policy import LayerPolicy, Policy
from lowtide.runtime.graph import GraphLayer
from lowtide.trace.pieces import stored_in
from lowtide.trace.split_part import Role, SplitGraph, compiled_part, saved_bytes
from lowtide.trace.trace import Part, Trace

if TYPE_CHECKING:
    from torch.fx import Node

__all__ = ["LayerCall", "calls_of", "with_compiled_layers"]


class _Form(NamedTuple):
    """A tensor that a layer is called with."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def make(self) -> Tensor:
        """One of this form; its memory is not touched."""
        made = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        return made.requires_grad_(self.requires_grad)


class LayerCall(NamedTuple):
    """How a layer is called."""

    args: Any
    kwargs: Any
    autocast: AutocastState


@contextmanager
def calls_of(layers: Sequence[nn.Module]) -> Iterator[dict[int, LayerCall]]:
    """How each layer is called inside this context, by its number; tensors are not held."""
    found: dict[int, LayerCall] = {}

    def look(index: int) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            found[index] = LayerCall(tree_map(_form, args), tree_map(_form, kwargs), autocast_state())

        return hook

    hooks = [layer.register_forward_pre_hook(look(index), with_kwargs=True) for index, layer in enumerate(layers)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _form(value: Any) -> Any:
    if not isinstance(value, Tensor) or (type(value) is not Tensor and not isinstance(value, FakeTensor)):
        return value
    return _Form(tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad)


def _made(value: Any) -> Any:
    """What a layer is called with again; forms are tuples, which are taken for containers otherwise."""
    if isinstance(value, _Form):
        return value.make()
    if isinstance(value, tuple | list):
        made = map(_made, value)
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return {name: _made(one) for name, one in value.items()} if type(value) is dict else value


def with_compiled_layers(
    trace: Trace,
    model: nn.Module,
    layers: Sequence[nn.Module],
    calls: Mapping[int, LayerCall],
    progress: Callable[[str], None] = lambda _: None,
) -> Trace:
    """The Trace with compiled layers where the joint graph of their kind can be had; notes say which are not, and why.

    ``layers`` are those of the model; where one is not compiled itself, it is priced as compiled alone, with the
    backend of ``model`` if that is compiled, else Inductor.
    """
    parts = list(trace.parts)
    notes: list[str] = []
    eager: dict[str, int] = {}
    before = after = 0
    for place, part in enumerate(trace.parts):
        index = trace.layers.index(place)
        progress(f"splitting the joint graph of layer {index}")
        found = _priced(part, model, layers[index], calls.get(index))
        count = trace.layers.count(place)
        if isinstance(found, str):
            eager[found] = eager.get(found, 0) + count
            continue
        before += count * _saved(part)
        after += count * _saved(found)
        parts[place] = found
    priced = len(trace.layers) - sum(eager.values())
    if priced:
        alone = ", each as if it were compiled alone" if is_compiled(model) else ""
        notes.insert(
            0,
            f"{_layers(priced)} priced from the split joint graph of torch.compile{alone}: {after / max(1, before):.2f}"
            " times the bytes that the eager ones save; what runs outside the layers is priced in eager mode",
        )
    for why, count in eager.items():
        notes.append(f"{_layers(count)} compiled, and priced in eager mode, where more is held: {why}")
    return replace(trace, parts=tuple(parts), notes=(*trace.notes, *dict.fromkeys(notes)))


def _layers(count: int) -> str:
    return f"{count} layers are" if count > 1 else "1 layer is"


def _saved(part: Part) -> int:
    """The bytes that a part saves, each storage once."""
    return sum(part.values[number].size for number in {pack.value for pack in part.packs if pack.value >= 0})


def _priced(part: Part, model: nn.Module, layer: nn.Module, call: LayerCall | None) -> Part | str:
    """The compiled layer, or why it cannot be had."""
    if part.syncs or any(kernel.ranks or kernel.stream for kernel in part.kernels):
        return "its ranks communicate inside the layers"
    if call is None or part.output is None:
        return "its output does not go to the next layer"
    given = [*tensors_of((call.args, call.kwargs)), *layer.parameters(), *layer.buffers()]
    if any(type(one) not in (Tensor, nn.Parameter, FakeTensor) for one in given):
        return "its parameters, or what it is called with, are of a tensor subclass"
    try:
        with unset_fake_temporarily(), _substituted(layer) as plain, _called(call):
            args, kwargs = _made(call.args), _made(call.kwargs)
            known = {id(one) for one in (*plain.parameters(), *plain.buffers())}
            first = next(iter(tensors_of((args, kwargs))), None)

            def read(joint: JointGraph) -> Part | str:
                if not any(map(entry_of, joint.module.graph.nodes)):  # the layer's end was not reached in this graph
                    return "torch.compile breaks its graph inside the layer"
                roles = _roles(joint, known, first)
                return "the inputs of its graph are not the layer's" if roles is None else _split(part, joint, roles)

            found = joint_graph(lambda: _compiled(model, layer)(*args, **kwargs), read)
            return "torch.compile made no graph of forward and backward" if found is None else found
    except Exception as error:  # of the compiler or the layer, of any kind; the eager price is higher, and safe
        return f"{type(error).__name__}: {error}".partition("\n")[0][:200]


def _compiled(model: nn.Module, layer: nn.Module) -> Callable[..., Any]:
    """The layer, compiled as the model is, with its operators marked."""
    plain = uncompiled(layer)
    settings = LayerPolicy()
    marks = GraphLayer.of(plain, settings, Policy((settings,), origin="solver"))
    plain.forward = marks.traceable(plain.forward, plain.forward)  # taken off by `_substituted`
    return layer if is_compiled(layer) else compiled_alike(model, plain)


@contextmanager
def _substituted(layer: nn.Module) -> Iterator[nn.Module]:
    """The layer with plain tensors in place of fake ones; their memory is not touched. Restored afterwards."""
    plain = uncompiled(layer)
    forward = plain.__dict__.get("forward")
    replaced: list[tuple[Any, dict[str, Any]]] = []
    made: dict[int, Tensor] = {}
    try:
        for module in plain.modules():
            tables: tuple[Any, Any] = (parameters_of(module), buffers_of(module))
            for table in tables:
                fake = {name: one for name, one in table.items() if isinstance(one, FakeTensor)}
                replaced.append((table, fake))
                for name, one in fake.items():
                    if id(one) not in made:
                        form = _form(one)._replace(requires_grad=False)
                        new: Tensor = form.make()
                        made[id(one)] = nn.Parameter(new, one.requires_grad) if isinstance(one, nn.Parameter) else new
                    table[name] = made[id(one)]
        yield plain
    finally:
        for table, fake in replaced:
            table.update(fake)
        if forward is None:
            plain.__dict__.pop("forward", None)
        else:
            plain.__dict__["forward"] = forward


@contextmanager
def _called(call: LayerCall) -> Iterator[None]:
    """What the layer was called in, with compilation on."""
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(default_stance())
        for context in autocast_contexts(call.autocast):
            stack.enter_context(context)
        yield


def _roles(joint: JointGraph, known: set[int], first: Tensor | None) -> dict[str, Role] | None:
    """What each input of the joint graph is; None if they are not those that the layer was called with."""
    names = [
        node.name
        for node in joint.module.graph.nodes
        if node.op == "placeholder" and "tangents" not in str(node.target)
    ]
    if len(names) != len(joint.inputs):
        return None
    return {
        name: "parameter" if id(given) in known else "input" if given is first else "other"
        for name, given in zip(names, joint.inputs, strict=True)
    }


def _split(part: Part, joint: JointGraph, roles: Mapping[str, Role]) -> Part:
    """The compiled layer: split undecided, and once for each operator that saves something."""

    def split(decided: str | None) -> SplitGraph:
        module = copied(joint.module)
        if decided is not None:
            mark(recomputed_nodes(module.graph, lambda _, operator: operator == decided))
        forward, backward = joint.split(module)
        return SplitGraph(forward.graph, backward.graph, joint.outputs, roles, joint.fuses)

    undecided = split(None)
    before = saved_bytes(undecided)
    known = {node.name for node in _stored(undecided)}
    owners = [name for source, name in before if source == "operator" and name]
    added: dict[str, list[str]] = {}
    freed: dict[str, int] = {}
    for operator in owners:
        decided = split(operator)
        added[operator] = [node.name for node in _stored(decided) if node.name not in known]
        freed[operator] = sum(before.values()) - sum(saved_bytes(decided).values())
    return compiled_part(part, undecided, added, freed)


def _stored(split: SplitGraph) -> list[Node]:
    """The storages that forward saves, and made."""
    found = dict.fromkeys(map(stored_in, saved_tensors(split.forward, split.outputs)))
    return [node for node in found if node.op != "placeholder"]

"""What compiled layers really hold for backward, and what a Trace says that they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.operators.calls import tensors_of
from lowtide.planner.problem import LayerCost, layer_cost
from lowtide.policy import Policy, Recompute, resolve
from lowtide.trace.trace import Part, Trace

__all__ = ["held_bytes", "predicted_bytes"]


def held_bytes(run: Callable[[], Any], layers: Sequence[nn.Module], model: nn.Module) -> int:
    """What the layers save for backward in a run after the first, each storage once, without parameters, buffers and
    what is given to them besides the first tensor, such as a table of positions."""
    own = {_address(one) for one in [*model.parameters(), *model.buffers()]}
    seen: dict[int, int] = {}
    inside = False

    def pack(tensor: Tensor) -> Tensor:
        if inside and _address(tensor) not in own:
            seen[_address(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal inside
        inside = True
        own.update(map(_address, tensors_of((args, kwargs))[1:]))

    def leave(*_: Any) -> None:
        nonlocal inside
        inside = False

    run()
    hooks = [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in layers]
    hooks += [layer.register_forward_hook(leave) for layer in layers]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            kept = run()
    finally:
        for hook in hooks:
            hook.remove()
    del kept
    return sum(seen.values())


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def predicted_bytes(trace: Trace, policy: Policy | None = None) -> int:
    """What the Trace's layers save under a Policy that keeps and recomputes."""
    if policy is None:
        return sum(_held(trace.parts[place], set()) for place in trace.layers)
    resolved = resolve(policy.for_layers(len(trace.layers)), trace.catalogue, require_match=False)
    total = 0
    for place, layer in zip(trace.layers, resolved.layers, strict=True):
        recomputed = {name for name, decision in layer.decisions.items() if isinstance(decision, Recompute)}
        total += _held(trace.parts[place], recomputed)
    return total


def _held(part: Part, recomputed: set[str]) -> int:
    cost = layer_cost(part, lambda kernel: 0.0)
    repeated = _repeated(cost, {index for index, one in enumerate(cost.operators) if one.name in recomputed})
    held = cost.boundary + cost.fixed
    held += sum(one.held for index, one in enumerate(cost.operators) if index not in repeated)
    return held + sum(
        one.size for one in cost.inputs if repeated.intersection(one.readers) and one.owner not in repeated
    )


def _repeated(cost: LayerCost, recomputed: set[int]) -> set[int]:
    """Those that backward asks for something of, and those that these are rebuilt from."""
    found = {index for index in recomputed if cost.operators[index].held and cost.operators[index].repeatable}
    while True:
        more = {one.owner for one in cost.inputs if found.intersection(one.readers) and one.owner in recomputed}
        if more <= found:
            return found
        found |= {one for one in more if one is not None}

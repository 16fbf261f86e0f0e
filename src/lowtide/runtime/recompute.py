"""Recompute a whole layer: nothing that it saves is held, and backward runs it again.

A layer's call is captured and replayed as a single operator's is (:mod:`lowtide.runtime.captured_call`). All that
autograd saves in it is referred to by index, and a replay gives all of it at once.

Torch's checkpoint does the same. This restores what that does not ([Note: what a replay finds]), leaves the weights
that autocast has cast as they are, and takes less time. Where Dynamo traces a layer, torch's is what it knows, and is
used.

[Note: where a recomputed layer stops]
A replay stops once it has all that was saved. Where that is depends on what the layer saved, and so on this rank's
control flow. Tensor-parallel ranks have the same tokens and stop at the same point. Context-parallel ranks have as many
of them: a module that exchanges heads for tokens says so, by an attribute that names its group. Ranks that send tokens
to experts differ: one whose experts got none may have saved nothing after the exchange, stops before it, and leaves the
others waiting there. The same goes for modules inside the layer that gather their own shards. Such layers run to their
end.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lowtide._torch_private.collectives import group_name_of, is_collective
from lowtide._torch_private.compiled import is_dynamo_compiling
from lowtide._torch_private.modes import DisableTorchFunction, function_modes
from lowtide.operators.calls import tensors_of
from lowtide.operators.saved import Saved, call_with_hooks
from lowtide.operators.wrappers import Function
from lowtide.policy import Keep, Policy
from lowtide.runtime.ambient import ambient, precision
from lowtide.runtime.arguments import hold
from lowtide.runtime.captured_call import CapturedCall, HeldArgument, SavedArgument
from lowtide.runtime.communication import keep_slice, keeping_collectives, tensor_parallel_group
from lowtide.runtime.ledger import Ledger, Line
from lowtide.runtime.module_state import Attributes, BufferCopies, ModuleStates, modules_of
from lowtide.runtime.outside import Outside
from lowtide.runtime.randomness import HostRandom, RandomState, default_generators
from lowtide.runtime.references import Inside
from lowtide.runtime.refuse import is_left_alone

__all__ = ["may_stop_early", "recompute_layer"]

EVEN_GROUP = "lowtide_even_group"
"""The attribute by which a module names the group in which all ranks give and get as much as each other."""


def recompute_layer(forward: Function, layer: nn.Module, policy: Policy, ledger: Ledger, line: Line) -> Function:
    """The forward of a layer that is recomputed as a whole, with its communication as the Policy says."""
    recomputed = _RecomputedLayer(forward, layer, ledger, line)

    # A function of its own, so that torch.compile finds a frame to begin with: torch's own are skipped.
    def whole(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        return recomputed.run(args, kwargs)

    made: Function = whole
    if not policy.communication.reissue_collectives:
        made = keeping_collectives(made, recomputed.run, layer, line.layer, ledger)
    if policy.communication.slice_inputs and policy.layers[line.layer].boundary == Keep():
        made = keep_slice(made, layer, line.layer, ledger)
    if made is whole:
        return whole

    def unless_left_alone(*args: Any, **kwargs: Any) -> Any:
        if not is_dynamo_compiling() and torch.is_grad_enabled() and is_left_alone():
            return forward(*args, **kwargs)
        return made(*args, **kwargs)

    return unless_left_alone


class _RecomputedLayer:
    """A layer whose calls are captured and replayed."""

    def __init__(self, forward: Function, layer: nn.Module, ledger: Ledger, line: Line) -> None:
        self.forward, self.layer, self.ledger, self.line = forward, layer, ledger, line
        self.buffers, self.outside = BufferCopies(), Outside()
        self.attributes: Attributes | None = None
        """Of its modules, when it was last called; hardly ever have they changed since."""
        self.stops: bool | None = None
        """Whether a replay may stop early; None until the layer has run among several ranks."""

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        around: tuple[AbstractContextManager[Any], AbstractContextManager[Any]] | None = None,
    ) -> Any:
        """Call the layer; ``around`` is what its call and its replay run in."""
        if not torch.is_grad_enabled() or is_left_alone():
            return self.forward(*args, **kwargs)
        call = self._capture(args, kwargs)
        in_forward: AbstractContextManager[Any] = nullcontext()
        if around is not None:
            in_forward, call.around = around

        def pack(tensor: Tensor) -> Saved:
            index, call.saved = call.saved, call.saved + 1
            if not function_modes():
                return Inside(call, index, tensor)
            with DisableTorchFunction():  # our own look at the tensor is no call of the layer's
                return Inside(call, index, tensor)

        if self.stops is None and _several_ranks():
            with in_forward, _Groups() as groups:
                output = call_with_hooks(pack, self.forward, args, kwargs)
            self.stops = may_stop_early(self.layer, groups.names)
        else:
            with in_forward:
                output = call_with_hooks(pack, self.forward, args, kwargs)
        call.stops = self.stops is not False
        assert call.random is not None
        if not call.random.moved():
            call.random = None
        return output

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CapturedCall:
        attributes = self.attributes
        if attributes is None or not attributes.unchanged():
            attributes = self.attributes = Attributes(modules_of(self.layer), self.outside)
        given = tensors_of((args, kwargs))
        device = given[0].device if given else torch.device("cpu")
        call = CapturedCall(self.forward, device, self.line, self.ledger, ambient(precision()))
        call.capture(args, kwargs, _hold)
        call.module = ModuleStates(attributes)
        call.buffers = self.buffers.take(attributes.modules)
        call.random = RandomState([*default_generators(given), *attributes.generators])
        call.host = HostRandom()
        call.stops = True  # where the layer itself runs a backward, what it has saved so far is all there is
        return call


def _hold(value: Any) -> Any:
    """What is held in place of an argument."""
    if not isinstance(value, Tensor):
        return hold(value)
    return HeldArgument(value) if value.is_inference() else SavedArgument(value)


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def may_stop_early(layer: nn.Module, groups: frozenset[str]) -> bool:
    """Whether a replay of a layer that issues collectives in ``groups`` may stop at the last tensor that it needs.

    See [Note: where a recomputed layer stops].
    """
    from torch.distributed.fsdp import FSDPModule

    nested = any(isinstance(module, FSDPModule) for module in layer.modules() if module is not layer)
    alike = {tensor_parallel_group(layer), *(getattr(module, EVEN_GROUP, None) for module in layer.modules())}
    return not nested and groups <= {group.group_name for group in alike if group is not None}


class _Groups(TorchFunctionMode):
    """Notes the groups in which functional collectives are issued."""

    def __init__(self) -> None:
        super().__init__()
        self.names: frozenset[str] = frozenset()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_collective(func):
            self.names |= {group_name_of(args, kwargs or {}) or "unknown"}
        return func(*args, **(kwargs or {}))

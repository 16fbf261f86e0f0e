"""Recompute a whole layer: torch's checkpoint runs it again in backward, and here it runs as it did.

[Note: what a replay finds]
Torch's checkpoint replays a layer with its tensors, torch's random numbers and autocast. All else is done here:

- arguments that can change, such as lists or a cache of keys and values, are copied (:mod:`lowtide.runtime.arguments`);
- the layer's buffers are copied, and a replay writes into copies, so that running statistics are updated once;
- its modules' attributes and parameters are restored, or the replay is refused;
- random numbers of Python, numpy, other devices and of generators that the layer holds are drawn again;
- torch's settings are restored (:mod:`lowtide.runtime.ambient`).

What a layer reads elsewhere than :mod:`lowtide.runtime.outside` looks cannot be known.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from lowtide._torch_private.backward import current_backward
from lowtide._torch_private.collectives import group_name_of, is_collective
from lowtide._torch_private.compiled import is_dynamo_compiling
from lowtide._torch_private.profiler import profiler_range
from lowtide._torch_private.saved_tensor_hooks import (
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    top_saved_tensors_hooks,
)
from lowtide.operators.calls import tensors_of
from lowtide.operators.saved import unpack_once
from lowtide.operators.wrappers import Function, take_back
from lowtide.policy import Keep, Policy
from lowtide.runtime.ambient import ambient, precision, restored
from lowtide.runtime.arguments import Copied, is_shared
from lowtide.runtime.communication import keep_slice, keeping_collectives, tensor_parallel_group
from lowtide.runtime.ledger import Ledger, Line
from lowtide.runtime.module_state import Attributes, BufferCopies, ModuleStates, modules_of
from lowtide.runtime.outside import Outside
from lowtide.runtime.randomness import HostRandom, RandomState, device_generators
from lowtide.runtime.refuse import is_left_alone

__all__ = ["may_stop_early", "recompute_layer"]

EVEN_GROUP = "lowtide_even_group"
"""The attribute by which a module names the group in which all ranks give and get as much as each other."""


def recompute_layer(forward: Function, layer: nn.Module, policy: Policy, ledger: Ledger, line: Line) -> Function:
    """The forward of a layer that is recomputed as a whole, with its communication as the Policy says."""
    replays = _Replays(layer, line.whose)
    checkpointed = _Checkpointed(replays.replayed(_timed(forward, ledger, line)), layer)

    # A function of its own, so that torch.compile finds a frame to begin with: torch's own are skipped.
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        return checkpointed(args, kwargs)

    whole: Function = recomputed
    if not policy.communication.reissue_collectives:
        whole = keeping_collectives(whole, checkpointed, layer, line.layer, ledger)
    if policy.communication.slice_inputs and policy.layers[line.layer].boundary == Keep():
        whole = keep_slice(whole, layer, line.layer, ledger)
    return replays.captured(whole, forward)


def _timed(forward: Function, ledger: Ledger, line: Line) -> Function:
    """A layer's forward as torch's checkpoint replays it in backward; what that takes is timed."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        if current_backward() == -1:
            return forward(*args, **kwargs)
        given = args[0] if args else None
        device = given.device if type(given) is Tensor else _device_of((args, kwargs))
        begin = ledger.begin(device)
        line.recomputes += 1
        try:
            with profiler_range(f"lowtide::recompute layer {line.layer}"):
                return forward(*args, **kwargs)
        finally:  # the checkpoint stops it early by an exception
            ledger.end(line, device, begin)

    return timed


def _device_of(given: Any) -> torch.device:
    return next((tensor.device for tensor in tensors_of(given)), torch.device("cpu"))


class _Checkpointed:
    """Runs a layer in torch's checkpoint. See [Note: where a recomputed layer stops]."""

    def __init__(self, again: Function, layer: nn.Module) -> None:
        self.again, self.layer = again, layer
        self.early: bool | None = None
        """Whether it may stop early; None until it has run among several ranks."""

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], **settings: Any) -> Any:
        early = self.early
        if early is not None or not torch.is_grad_enabled() or not _several_ranks():
            return checkpoint(
                self.again, *args, use_reentrant=False, early_stop=early is not False, **settings, **kwargs
            )
        with _Groups() as groups:
            output = checkpoint(self.again, *args, use_reentrant=False, early_stop=False, **settings, **kwargs)
        self.early = may_stop_early(self.layer, groups.names)
        return output


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def may_stop_early(layer: nn.Module, groups: frozenset[str]) -> bool:
    """Whether a recomputed layer that issues collectives in ``groups`` may stop at the last tensor that it needs.

    [Note: where a recomputed layer stops]
    Torch's checkpoint stops a recomputation once it has all that was saved. Where that is depends on what the layer
    saved, and so on this rank's control flow. Tensor-parallel ranks have the same tokens and stop at the same point.
    Context-parallel ranks have as many of them: a module that exchanges heads for tokens says so, by an attribute that
    names its group. Ranks that send tokens to experts differ: one whose experts got none may have saved nothing after
    the exchange, stops before it, and leaves the others waiting there. The same goes for modules inside the layer that
    gather their own shards. Such layers run to their end.
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


def _recompute_once_for_both_halves() -> bool:
    """On top of the checkpoint's hooks, push some that ask them once for a backward in two halves.

    Torch's checkpoint recomputes a layer for every graph task. See [Note: a backward in two halves] in
    :mod:`lowtide.operators.saved`. False where the checkpoint has no hooks: without gradients it does nothing.
    """
    top = top_saved_tensors_hooks(False)
    if top is None:
        return False
    push_saved_tensors_hooks(top[0], partial(unpack_once, top[1]))
    return True


_CALL = "lowtide_call"
"""The keyword that carries a call through the checkpoint to its replay."""


class _Replays:
    """What has to be known of a layer so that its calls can be replayed."""

    def __init__(self, layer: nn.Module, whose: str) -> None:
        self.layer, self.whose = layer, whose
        self.buffers, self.outside = BufferCopies(), Outside()
        self.attributes: Attributes | None = None
        """Of its modules, when it was last called; hardly ever have they changed since."""

    def captured(self, whole: Function, plain: Function) -> Function:
        """The layer, each of its calls captured; ``whole`` runs and later replays what :meth:`replayed` returned.

        ``plain`` is the layer as it is.
        """

        def captured(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or not torch.is_grad_enabled():
                return whole(*args, **kwargs)
            if is_left_alone():
                return plain(*args, **kwargs)
            call = _Call(self, args, kwargs)
            return whole(*call.args, **call.kwargs, **{_CALL: call})

        return captured

    def replayed(self, again: Function) -> Function:
        """The layer's forward, as it runs in forward and is replayed in backward."""

        def run(*args: Any, **kwargs: Any) -> Any:
            call: _Call | None = kwargs.pop(_CALL, None)
            if call is None:
                return again(*args, **kwargs)
            if not call.ran:
                args, kwargs = call.begin(args, kwargs)
                pushed = _recompute_once_for_both_halves()
                try:
                    return again(*args, **kwargs)
                finally:
                    if pushed:
                        pop_saved_tensors_hooks()
            # Hardly ever by contexts: torch's checkpoint ends this by an exception, and contexts that are functions
            # take ten times as long then.
            undo = call.put_back()
            try:
                args, kwargs = call.given_again(args, kwargs)
                return again(*args, **kwargs)
            finally:
                take_back(undo)

        return run


class _Argument:
    """Replaces an argument that can change."""

    __slots__ = ("copied", "original")

    def __init__(self, original: Any, copied: Copied) -> None:
        self.original, self.copied = original, copied


class _Call:
    """One call of a layer. See [Note: what a replay finds]."""

    __slots__ = ("ambient", "args", "buffers", "host", "kwargs", "modules", "ran", "random", "whose")

    def __init__(self, whole: _Replays, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.whose, self.ran = whole.whose, False
        attributes = whole.attributes
        if attributes is None or not attributes.unchanged():
            attributes = whole.attributes = Attributes(modules_of(whole.layer), whole.outside)
        self.args = tuple([_held(value) for value in args])
        self.kwargs = {name: _held(value) for name, value in kwargs.items()}
        self.modules = ModuleStates(attributes)
        self.buffers = whole.buffers.take(attributes.modules)
        # The checkpoint restores the host's generator, and those of the devices that positional arguments are on.
        on_device = any(isinstance(value, torch.Tensor) and not value.is_cpu for value in args)
        generators = [*attributes.generators, *([] if on_device else device_generators(tensors_of(kwargs)))]
        self.random = RandomState(generators) if generators else None
        self.host = HostRandom()
        self.ambient = ambient(precision())

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the first run. From then on only their copies are held."""
        self.ran = True
        given = tuple([_original(value) for value in args]), {name: _original(value) for name, value in kwargs.items()}
        self.args, self.kwargs = (), {}  # the checkpoint has the same, for the replay
        return given

    def given_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a replay."""
        whose = self.whose
        return (
            tuple([value.copied.again(whose) if type(value) is _Argument else value for value in args]),
            {name: value.copied.again(whose) if type(value) is _Argument else value for name, value in kwargs.items()},
        )

    def put_back(self) -> list[Callable[[], object]]:
        """Restore everything; returns what undoes that."""
        undo: list[Callable[[], object]] = []
        try:
            undo.append(self.modules.put_back(self.whose))
            now = HostRandom()
            undo.append(now.set)
            self.host.set()
            if self.random is not None:
                undo.append(self.random.put_back())
            if contexts := restored(self.ambient):
                undo.append(_entered(contexts))
            if self.buffers:
                undo.append(_entered([BufferCopies.restored(self.buffers)]))
        except BaseException:
            take_back(undo)
            raise
        return undo


def _entered(contexts: list[AbstractContextManager[None]]) -> Callable[[], object]:
    """Enter them; returns what exits them."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        return stack.pop_all().close


def _held(value: Any) -> Any:
    """What the checkpoint holds in place of an argument: itself, unless it can change."""
    if value is None or isinstance(value, torch.Tensor) or (type(value) is not tuple and is_shared(value)):
        return value
    copied = Copied(value)
    return value if copied.fixed and not copied.tensors else _Argument(value, copied)


def _original(value: Any) -> Any:
    if type(value) is not _Argument:
        return value
    original, value.original = value.original, None
    return original

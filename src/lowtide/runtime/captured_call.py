"""One call of a recomputed operator: captured in forward, replayed when backward first needs what it produced.

[Note: rebuilding]
While a layer with recomputed operators runs, each call of such an operator is captured: the function, its arguments,
the random state, autocast and torch's other settings. Nothing that the call produced is held. A tensor that autograd
wants to save is replaced by a reference (:mod:`lowtide.runtime.references`):

- ``Produced``: an output of a captured call, or a view of one;
- ``Inside``: a tensor that the call itself saved, by its index among all that it saved;
- ``Cast``: a cast of an output to another dtype, as autocast makes them.

When backward unpacks one, the call is replayed from its arguments, and everything that is wanted comes out of that one
replay. An argument that another captured call produced is itself a reference, so a chain is recomputed from its start,
each call once. A call frees its results when nothing outstanding needs them.

Values are never guessed: arguments and random state are those of this very call. That a tensor *is* an output of a
call is known by identity: it is the very object that the call returned, or a view of it, unchanged since
(:mod:`lowtide.runtime.registry`). What a call saved is known by its index among all that this call saved. Only a cast
is recognised, among the arguments of the call that saves it, where the layer's profile says that a cast is saved there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lowtide._torch_private.autocast import autocast_contexts, autocast_state
from lowtide._torch_private.backward import set_grad_enabled
from lowtide._torch_private.collectives import finish_collective
from lowtide._torch_private.profiler import profiler_range
from lowtide._torch_private.subclasses import PLAIN
from lowtide._torch_private.versions import version_of
from lowtide.errors import RebuildError
from lowtide.operators.calls import mapped, tensors_of
from lowtide.operators.saved import Saved
from lowtide.operators.wrappers import Function
from lowtide.runtime.ambient import Ambient, restored
from lowtide.runtime.arguments import Copied
from lowtide.runtime.ledger import Ledger, Line
from lowtide.runtime.module_state import BufferCopies, ModuleStates
from lowtide.runtime.randomness import HostRandom, RandomState
from lowtide.runtime.tensor_form import TensorForm, compare_form, form_of_tensor

__all__ = ["CapturedCall", "HeldArgument", "RecomputedArgument"]


class HeldArgument:
    """A tensor that a call was given, held as it is."""

    # No tuple: nested values must take it for a leaf.
    __slots__ = ("offloaded", "requires_grad", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.offloaded: Saved | None = None
        """Where it is, if it was offloaded after it was captured."""
        self.version, self.requires_grad = version_of(tensor), tensor.requires_grad

    def offload(self, find: Callable[[Tensor], Saved | None]) -> None:
        """Hold what ``find`` gives in place of the tensor, if it gives anything."""
        tensor = self.tensor
        if tensor is not None and version_of(tensor) == self.version:
            self.offloaded = find(tensor)
            if self.offloaded is not None:
                self.requires_grad, self.tensor = tensor.requires_grad, None

    def again(self, whose: str) -> Tensor:
        """The tensor for a replay; RebuildError if it was written to."""
        if self.tensor is None:
            assert self.offloaded is not None
            return _given_again(self.offloaded.tensor(), self.requires_grad)
        if version_of(self.tensor) != self.version:
            raise RebuildError(
                f"{whose} cannot be recomputed: one of its inputs was changed in place after it ran (version"
                f" {version_of(self.tensor)}, expected {self.version}); keep this operator"
            )
        return self.tensor  # the graph that grows on it is dropped at once


class RecomputedArgument:
    """A tensor that a call was given and that another captured call produced."""

    __slots__ = ("requires_grad", "source")

    def __init__(self, source: Saved, requires_grad: bool) -> None:
        self.source, self.requires_grad = source, requires_grad

    def again(self, whose: str) -> Tensor:
        """The tensor for a replay."""
        return _given_again(self.source.tensor(), self.requires_grad)


def _given_again(tensor: Tensor, requires_grad: bool) -> Tensor:
    """The argument of a replay, made from what was recomputed or reloaded.

    It is no leaf, and was none in forward: autocast keeps the casts of leaves until its context ends, and with them the
    graph of the replay. Around a pipeline's step that is the end of the step.
    """
    if not requires_grad:
        return tensor.detach()
    leaf = tensor.detach().requires_grad_()
    if leaf.is_nested or leaf.layout is not torch.strided:  # they may have no alias
        return leaf
    before = torch.is_grad_enabled()
    set_grad_enabled(True)
    try:
        return leaf[...]  # with the same strides, by which kernels are chosen
    finally:
        set_grad_enabled(before)


_ARGUMENTS = (HeldArgument, RecomputedArgument, Copied)


class CapturedCall:
    """One call of a recomputed operator. See [Note: rebuilding]."""

    __slots__ = (
        "ambient", "args", "autocast", "buffers", "collective", "device", "forms", "function", "host", "inside_forms",
        "insides", "kwargs", "ledger", "line", "module", "outputs", "pending", "random", "saved", "wanted",
        "wanted_insides",
    )  # fmt: skip

    def __init__(self, function: Function, device: torch.device, line: Line, ledger: Ledger, ambient: Ambient) -> None:
        self.function, self.device, self.line, self.ledger, self.ambient = function, device, line, ledger, ambient
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.autocast = autocast_state()
        self.random: RandomState | None = None
        self.host: HostRandom | None = None
        self.module: ModuleStates | None = None
        self.buffers: list[tuple[dict[str, Any], str, Tensor]] = []
        self.saved = 0
        """How many tensors it saved."""
        self.collective = False
        self.pending = 0
        """References that were not unpacked yet."""
        self.wanted: list[int] = []
        """The outputs that something refers to."""
        self.wanted_insides: list[int] = []
        self.forms: list[TensorForm | None] = []
        """Of its outputs."""
        self.inside_forms: dict[int, TensorForm | None] = {}
        """Of what it saved, where that is wanted."""
        self.outputs: dict[int, Tensor] | None = None
        self.insides: dict[int, Tensor] = {}

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any], hold: Callable[[Any], Any]) -> None:
        """Remember the arguments; ``hold`` says what is held in place of each.

        A tensor that is given twice is one tensor when the call is replayed: functions ask whether ``key is query``.
        """
        same: dict[int, Any] = {}

        def once(value: Any) -> Any:
            held = same.get(id(value))
            if held is None:
                held = same[id(value)] = hold(value)
            return held

        self.args = tuple([mapped(value, once, PLAIN) for value in args])
        self.kwargs = mapped(kwargs, once, PLAIN) if kwargs else kwargs

    def want_output(self, index: int) -> None:
        """Something outstanding refers to an output."""
        self.pending += 1
        if index not in self.wanted:
            self.wanted.append(index)

    def want_inside(self, index: int, tensor: Tensor) -> None:
        """Something outstanding refers to ``tensor``, which the call saves as the ``index``-th."""
        self.pending += 1
        self.wanted_insides.append(index)
        self.inside_forms[index] = form_of_tensor(tensor)

    def output(self, index: int) -> Tensor:
        """An output, recomputed if it is not there."""
        self.replay()
        assert self.outputs is not None
        return self.outputs[index]

    def inside(self, index: int) -> Tensor:
        """What the call saved, recomputed if it is not there."""
        self.replay()
        return self.insides[index]

    def release(self) -> None:
        """One reference was unpacked; with the last one the results are freed. A collective's live with the graph."""
        self.pending -= 1
        if self.pending <= 0 and not self.collective:
            self.outputs, self.insides = None, {}

    def replay(self) -> None:
        """Run the call again, unless its results are there. RebuildError if it does something else than it did."""
        if self.outputs is not None:
            return
        same: dict[int, Any] = {}

        def argument(value: Any) -> Any:
            if type(value) not in _ARGUMENTS:  # a leaf of another container, held as it is
                return value
            if id(value) not in same:
                same[id(value)] = value.again(self.line.whose)
            return same[id(value)]

        args = [mapped(value, argument, _ARGUMENTS) for value in self.args]
        kwargs = mapped(self.kwargs, argument, _ARGUMENTS) if self.kwargs else self.kwargs
        saved: list[Tensor] = []
        contexts = self._contexts(saved)
        begin = self.ledger.begin(self.device)
        before = torch.is_grad_enabled()
        set_grad_enabled(True)  # with gradients, as in forward: a kernel may be chosen by that
        try:
            with ExitStack() as stack:
                stack.enter_context(profiler_range(f"lowtide::recompute {self.line.operator}"))
                for context in contexts:
                    stack.enter_context(context)
                result = self.function(*args, **kwargs)
            if self.collective:
                result = finish_collective(result)
        finally:
            set_grad_enabled(before)
        self.ledger.end(self.line, self.device, begin)
        self.line.recomputes += 1
        self._take(result, saved)

    def _contexts(self, saved: list[Tensor]) -> list[AbstractContextManager[Any]]:
        """Contexts that restore everything that the call ran in; what it saves goes to ``saved`` if that is wanted."""
        contexts = [*restored(self.ambient), *autocast_contexts(self.autocast)]
        if self.wanted_insides:

            def pack(tensor: Tensor) -> int:
                # Detached: the graph holds this function, which holds the list, which must not hold the graph.
                saved.append(tensor.detach())
                return len(saved) - 1

            contexts.append(saved_tensors_hooks(pack, _never))
        if self.random is not None:
            contexts.append(self.random.restored())
        if self.host is not None:
            contexts.append(self.host.restored())
        if self.module is not None:
            contexts.append(self.module.restored(self.line.whose))
        if self.buffers:
            contexts.append(BufferCopies.restored(self.buffers))
        return contexts

    def _take(self, result: Any, saved: list[Tensor]) -> None:
        whose = self.line.whose
        produced = [result] if type(result) is Tensor else tensors_of(result)
        if len(produced) != len(self.forms):
            raise RebuildError(
                f"{whose} cannot be recomputed: it gave {len(self.forms)} tensors when it ran, and {len(produced)} when"
                " it was replayed; keep this operator"
            )
        if self.wanted_insides and len(saved) != self.saved:
            raise RebuildError(
                f"{whose} cannot be recomputed: it saved {self.saved} tensors for backward when it ran, and"
                f" {len(saved)} when it was replayed; keep this operator"
            )
        for index in self.wanted:
            compare_form(produced[index], self.forms[index], whose)
        for index in self.wanted_insides:
            compare_form(saved[index], self.inside_forms[index], whose)
        self.outputs = {index: produced[index].detach() for index in self.wanted}
        self.insides = {index: saved[index] for index in self.wanted_insides}


def _never(index: int) -> Tensor:
    raise RebuildError("a recomputed graph was run backward")  # it is dropped at once, so nothing can unpack it

"""A call that is recomputed, of one operator or of a whole layer: captured in forward, replayed in backward.

[Note: rebuilding]
Each call that is to be recomputed is captured: the function, its arguments, the random state, autocast and torch's
other settings. Nothing that the call produced is held. A tensor that autograd wants to save is replaced by a reference
(:mod:`lowtide.runtime.references`):

- ``Produced``: an output of a captured call, or a view of one;
- ``Inside``: a tensor that the call itself saved, by its index among all that it saved;
- ``Cast``: a cast of an output to another dtype, as autocast makes them.

When backward unpacks one, the call is replayed from its arguments, and everything that is wanted comes out of that one
replay. An argument that another captured call produced is itself a reference, so a chain is recomputed from its start,
each call once. A call frees its outputs when nothing outstanding needs them; what it saved is freed one by one, each
when it is unpacked. A later backward through the same graph replays it again.

A whole layer is one such call, of which all that is wanted is what it saved. Its replay ends, where it may, when the
last of that has been saved again (:mod:`lowtide.runtime.recompute`).

[Note: what a replay finds]
A call is replayed as it ran:

- arguments that can change, such as lists or a cache of keys and values, are copied (:mod:`lowtide.runtime.arguments`);
- the buffers of its module are copied, and a replay writes into copies, so that running statistics are updated once;
- its modules' attributes and parameters are restored, or the replay is refused (:mod:`lowtide.runtime.module_state`);
- random numbers are drawn again: torch's, Python's, numpy's, and those of generators that the module holds;
- autocast and torch's settings are restored (:mod:`lowtide.runtime.ambient`).

What a module reads elsewhere than :mod:`lowtide.runtime.outside` looks cannot be known.

Values are never guessed: arguments and random state are those of this very call. That a tensor *is* an output of a
call is known by identity: it is the very object that the call returned, or a view of it, unchanged since
(:mod:`lowtide.runtime.registry`). What a call saved is known by its index among all that this call saved. Only a cast
is recognised, among the arguments of the call that saves it, where the layer's profile says that a cast is saved there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType

import torch
from torch import Tensor

from lowtide._torch_private.autocast import autocast_contexts, autocast_state
from lowtide._torch_private.backward import set_grad_enabled
from lowtide._torch_private.collectives import finish_collective
from lowtide._torch_private.profiler import profiler_range
from lowtide._torch_private.saved_tensor_hooks import make_saved_tensor
from lowtide._torch_private.subclasses import PLAIN
from lowtide._torch_private.versions import version_of
from lowtide.errors import RebuildError
from lowtide.operators.calls import mapped, tensors_of
from lowtide.operators.saved import Saved, call_with_hooks
from lowtide.operators.wrappers import Function, take_back
from lowtide.runtime.ambient import Ambient, restored
from lowtide.runtime.arguments import Copied
from lowtide.runtime.ledger import Ledger, Line
from lowtide.runtime.module_state import BufferCopies, ModuleStates
from lowtide.runtime.randomness import HostRandom, RandomState
from lowtide.runtime.tensor_form import TensorForm, compare_form

if TYPE_CHECKING:
    from lowtide.runtime.references import Inside

__all__ = ["CapturedCall", "HeldArgument", "RecomputedArgument", "SavedArgument"]


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


class SavedArgument:
    """A tensor that a layer was given, saved as autograd would save it: hooks around the layer may offload it."""

    __slots__ = ("saved",)

    def __init__(self, tensor: Tensor) -> None:
        self.saved = make_saved_tensor(tensor)

    def again(self, whose: str) -> Tensor:
        """The tensor for a replay; RebuildError if it was written to."""
        try:
            return self.saved.unpack()
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            found = str(error).partition("inplace operation: ")[2].partition(" instead")[0]
            raise RebuildError(
                f"{whose} cannot be recomputed: a tensor in one of its arguments was changed in place after it ran"
                f" ({found}); keep it"
            ) from error


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


_ARGUMENTS = (HeldArgument, RecomputedArgument, SavedArgument, Copied)


class _Stopped(BaseException):
    """Ends a replay that has saved all that is wanted. No ``except Exception`` of a model's may catch it."""


class CapturedCall:
    """One call that is recomputed. See [Note: rebuilding]."""

    __slots__ = (
        "ambient", "args", "around", "autocast", "buffers", "collective", "device", "forms", "function", "host",
        "insides", "kwargs", "ledger", "left", "line", "module", "outputs", "random", "references", "saved", "stops",
        "wanted",
    )  # fmt: skip

    def __init__(self, function: Function, device: torch.device, line: Line, ledger: Ledger, ambient: Ambient) -> None:
        self.function, self.device, self.line, self.ledger, self.ambient = function, device, line, ledger, ambient
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.autocast = autocast_state()
        self.around: AbstractContextManager[Any] = nullcontext()
        """What else a replay runs in."""
        self.random: RandomState | None = None
        self.host: HostRandom | None = None
        self.module: ModuleStates | None = None
        self.buffers: list[tuple[dict[str, Any], str, Tensor]] = []
        self.collective = False
        self.stops = False
        """Whether a replay ends when the last tensor has been saved, and makes no outputs."""
        self.saved = 0
        """How many tensors it saved."""
        self.insides: dict[int, ReferenceType[Inside]] = {}
        """References to what it saved, by index."""
        self.forms: list[TensorForm | None] = []
        """Of its outputs."""
        self.wanted: list[int] = []
        """The outputs that something refers to."""
        self.references = self.left = 0
        """To outputs and insides, and those of them that this backward has not unpacked yet."""
        self.outputs: dict[int, Tensor] | None = None

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
        self.references += 1
        if index not in self.wanted:
            self.wanted.append(index)

    def want_inside(self, index: int, reference: ReferenceType[Inside]) -> None:
        """What the call saves as the ``index``-th is wanted."""
        self.references += 1
        self.insides[index] = reference

    def output(self, index: int) -> Tensor:
        """An output, recomputed if it is not there."""
        self.recompute()
        assert self.outputs is not None
        return self.outputs[index]

    def recompute(self) -> None:
        """Replay the call, unless its outputs are there."""
        if self.outputs is None:
            self.replay()

    def release(self) -> None:
        """One reference was unpacked; with the last one the outputs are freed. A collective's live with the graph."""
        self.left -= 1
        if self.left <= 0 and not self.collective:
            self.outputs = None

    def replay(self) -> None:
        """Run the call again. RebuildError if it does something else than it did."""
        same: dict[int, Any] = {}

        def argument(value: Any) -> Any:
            if type(value) not in _ARGUMENTS:  # a leaf of another container, held as it is
                return value
            if id(value) not in same:
                same[id(value)] = value.again(self.line.whose)
            return same[id(value)]

        args = tuple([mapped(value, argument, _ARGUMENTS) for value in self.args])
        kwargs = mapped(self.kwargs, argument, _ARGUMENTS) if self.kwargs else self.kwargs
        saved = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal saved
            reference = self.insides.get(saved)
            saved += 1
            # Detached: the graph of the replay holds it, and must not be held by it.
            tensor = tensor.detach() if tensor.requires_grad else tensor
            inside = reference() if reference is not None else None
            if inside is not None:
                inside.take(tensor)
            if self.stops and saved == self.saved:
                raise _Stopped
            return tensor

        result: Any = None
        begin = self.ledger.begin(self.device)
        self.line.recomputes += 1
        undo = self._restore()
        before = torch.is_grad_enabled()
        set_grad_enabled(True)  # with gradients, as in forward: a kernel may be chosen by that
        try:
            with profiler_range(f"lowtide::recompute {self.line.what}"), self.around, suppress(_Stopped):
                if self.insides:
                    result = call_with_hooks(pack, self.function, args, kwargs, _same)
                else:
                    result = self.function(*args, **kwargs)
            if self.collective:
                result = finish_collective(result)
        finally:
            set_grad_enabled(before)
            take_back(undo)
        self.ledger.end(self.line, self.device, begin)
        if self.insides and saved != self.saved:
            raise RebuildError(
                f"{self.line.whose} cannot be recomputed: it saved {self.saved} tensors for backward when it ran, and"
                f" {saved} when it was replayed; keep it"
            )
        self._take(result)

    def _restore(self) -> list[Callable[[], object]]:
        """Restore all that the call ran in; returns what undoes that. See [Note: what a replay finds]."""
        undo: list[Callable[[], object]] = []
        try:
            if self.module is not None:
                undo.append(self.module.put_back(self.line.whose))
            if self.host is not None:
                undo.append(self.host.put_back())
            if self.random is not None:
                undo.append(self.random.put_back())
            contexts = [*restored(self.ambient), *autocast_contexts(self.autocast)]
            if self.buffers:
                contexts.append(BufferCopies.restored(self.buffers))
            if contexts:
                with ExitStack() as stack:
                    for context in contexts:
                        stack.enter_context(context)
                    undo.append(stack.pop_all().close)
        except BaseException:
            take_back(undo)
            raise
        return undo

    def _take(self, result: Any) -> None:
        """Hold the outputs of a replay that something refers to."""
        if self.forms:
            produced = [result] if type(result) is Tensor else tensors_of(result)
            if len(produced) != len(self.forms):
                raise RebuildError(
                    f"{self.line.whose} cannot be recomputed: it gave {len(self.forms)} tensors when it ran, and"
                    f" {len(produced)} when it was replayed; keep it"
                )
            for index in self.wanted:
                compare_form(produced[index], self.forms[index], self.line.whose)
            self.outputs = {index: produced[index].detach() for index in self.wanted}
        self.left = self.references


def _same(tensor: Tensor) -> Tensor:
    return tensor

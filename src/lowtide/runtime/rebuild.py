"""Rebuild what an operator produced, when backward first needs it.

[Note: rebuilding]
While a layer with recomputed operators runs, each call of such an operator is captured: the function, its arguments,
the random state, autocast and torch's other settings. Of what the call produced nothing is held. A tensor that autograd
wants to save is replaced by a reference:

- ``Produced``: an output of a captured call, or a view of one;
- ``Inside``: a tensor the call itself saved on its way, by its place among all that it saved;
- ``Cast``: a cast of an output to another dtype, as autocast makes them;
- ``Repeated``: what a call gave whose node in the graph has saved all that the call was given. There is nothing to
  capture then, and nobody listens to such a call: see :mod:`lowtide.operators.nodes`. ``Grafted`` is the same where it
  takes the tensor's place after the call: see :mod:`lowtide.runtime.graft`.

When backward asks for one, the call is repeated from its arguments and everything asked for comes out of that one
repetition. An argument that another captured call produced is itself a reference, so a chain is rebuilt from its
start, each call once. A call forgets its results when nothing outstanding needs them.

Values are never guessed: arguments and random state are those of this very call. That a tensor *is* an output of a
call is known by identity: it is the very object the call returned, or a view of it, unchanged since. What a call saved
on its way is known by its place among all that this call saved. Only a cast is recognised, among the arguments of the
call that saves it, where the layer's learnt list says that a cast is what is saved there. A node is its tensor's own:
autograd gives a tensor that is written to another node, or counts the write.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lowtide._torch_private.autocast import autocast_contexts, autocast_state, is_any_autocast_enabled
from lowtide._torch_private.backward import set_grad_enabled
from lowtide._torch_private.collectives import finish_collective
from lowtide._torch_private.storages import StorageWeakRef, storage_key, weak_storage
from lowtide._torch_private.subclasses import PLAIN, inner_tensor
from lowtide._torch_private.versions import count_of_writes, version_of
from lowtide.errors import RebuildError
from lowtide.operators.calls import mapped, tensors_of
from lowtide.operators.nodes import NodeCall, NodeForm
from lowtide.operators.wrappers import Function
from lowtide.runtime.ambient import Ambient, restored
from lowtide.runtime.arguments import Copied, is_shared
from lowtide.runtime.ledger import Ledger, Line
from lowtide.runtime.module_state import BufferCopies, ModuleStates
from lowtide.runtime.randomness import HostRandom, RandomState
from lowtide.runtime.saved import Saved, unpack
from lowtide.runtime.view import View

__all__ = [
    "CapturedCall",
    "Cast",
    "Grafted",
    "Inside",
    "Produced",
    "Reference",
    "Registry",
    "Repeated",
    "SeenAs",
]


class Produced(NamedTuple):
    """An output of a captured call, or a view of one."""

    call: CapturedCall
    output: int
    view: View | None
    """None for the output itself."""

    def here(self) -> Tensor:
        """The tensor, rebuilt if it is not there."""
        tensor = self.call.output(self.output)
        return tensor if self.view is None else self.view.of(tensor)

    def tensor(self) -> Tensor:
        tensor = self.here()
        self.call.release()
        return tensor


class Inside(NamedTuple):
    """A tensor that a captured call saved on its way."""

    call: CapturedCall
    place: int

    def tensor(self) -> Tensor:
        tensor = self.call.inside(self.place)
        self.call.release()
        return tensor


class Cast(NamedTuple):
    """A cast of an output of a captured call."""

    source: Produced
    dtype: torch.dtype
    size: tuple[int, ...]

    def tensor(self) -> Tensor:
        tensor = self.source.here().to(self.dtype).view(self.size)
        self.source.call.release()
        return tensor


class Repeated:
    """What a call gave whose node has saved all that the call was given."""

    __slots__ = ("ambient", "call", "ledger", "line", "pending", "result")

    def __init__(self, call: NodeCall, line: Line, ledger: Ledger, ambient: Ambient) -> None:
        self.call, self.line, self.ledger, self.ambient = call, line, ledger, ambient
        self.pending = 1
        self.result: Tensor | None = None
        for operand in call[1]:
            if type(operand) is not Tensor:
                _want(operand)

    def tensor(self) -> Tensor:
        self.pending -= 1
        result = self.result
        if result is not None:
            if self.pending <= 0:
                self.result = None
            return result
        function, given, options = self._given()
        line = self.line
        line.recomputes += 1
        contexts = restored(self.ambient)
        if given[0].is_cpu and not contexts and not is_any_autocast_enabled():
            begin = perf_counter()
            result = function(*given, **options) if options else function(*given)
            line.recompute_seconds += perf_counter() - begin
        else:
            device = given[0].device
            began = self.ledger.begin(device)
            with ExitStack() as stack:
                # The node stands below autocast: its operands are cast already.
                for context in (*contexts, *autocast_contexts(())):
                    stack.enter_context(context)
                result = function(*given, **options)
            self.ledger.end(line, device, began)
        if result.requires_grad:  # with gradients of gradients only
            result = result.detach()
        if self.pending > 0:
            self.result = result
        return result

    def _given(self) -> NodeCall:
        """The call, with the tensors that it was given."""
        function, operands, options = self.call
        given = []
        for operand in operands:
            if type(operand) is not Tensor:
                operand = operand.tensor()
            elif operand._version:  # it was at none when the call was read
                raise RebuildError(
                    f"{self.line.whose} cannot be recomputed: one of its inputs was"
                    " changed in place after it ran; keep this operator"
                )
            given.append(operand)
        return function, tuple(given), options


class Grafted(Repeated):
    """As :class:`Repeated`, put into the graph after the call: autograd holds what the node saved in its own way."""

    __slots__ = ("form", "node")

    def __init__(self, node: Any, form: NodeForm, uses: int, line: Line, ledger: Ledger, ambient: Ambient) -> None:
        self.node, self.form, self.pending, self.line, self.ledger = node, form, uses, line, ledger
        self.ambient = ambient
        self.result: Tensor | None = None

    def instead_of(self, tensor: Tensor) -> Grafted:
        """What autograd holds in place of ``tensor``: this."""
        return self

    def _given(self) -> NodeCall:
        form, node = self.form, self.node
        return form.function, form.given(node), form.options(node)


def _want(saved: Any) -> None:
    """One more will ask for what autograd holds in place of a tensor."""
    if isinstance(saved, Repeated):
        saved.pending += 1
    elif isinstance(saved, Produced):
        saved.call.want_output(saved.output)
    elif isinstance(saved, Inside):
        saved.call.want_inside(saved.place)
    elif isinstance(saved, Cast | SeenAs):
        _want(saved.source)
    elif hasattr(saved, "saved"):  # something that stands around it
        _want(saved.saved)


class SeenAs(NamedTuple):
    """A view of what is repeated."""

    source: Repeated
    view: View

    def instead_of(self, tensor: Tensor) -> SeenAs:
        """As that of :class:`Grafted`."""
        return self

    def tensor(self) -> Tensor:
        return self.view.of(self.source.tensor())


Reference: TypeAlias = Produced | Inside | Cast | Repeated | SeenAs


class _Held:
    """An argument that is held as it is. No tuple: nested values must take it for a leaf."""

    __slots__ = ("requires_grad", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | Saved = tensor
        """Itself, or where it is now, if it was swapped after it was captured."""
        self.version = version_of(tensor)
        self.requires_grad = False
        """Whether it was, where it is away; a tensor that is here knows by itself."""


class _Referred:
    """An argument that another captured call produced."""

    __slots__ = ("requires_grad", "source")

    def __init__(self, source: Produced, requires_grad: bool) -> None:
        self.source, self.requires_grad = source, requires_grad


_ARGUMENTS = (_Held, _Referred, Copied)

Form: TypeAlias = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
"""What is compared of a tensor that was rebuilt: shape, stride, dtype and device."""


def form_of_tensor(tensor: Tensor) -> Form | None:
    """The form of a tensor; None for one that has no strides, such as a nested one."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _compare(tensor: Tensor, form: Form | None, whose: str) -> None:
    """Raise if a tensor was rebuilt in another form than it had."""
    found = form_of_tensor(tensor)
    if form is not None and form != found:
        raise RebuildError(
            f"{whose} cannot be recomputed: what it gave when it ran had {_described(form)}; when it was replayed it"
            f" gave {_described(found)}; keep it"
        )


def _described(form: Form | None) -> str:
    if form is None:
        return "no strides"
    shape, stride, dtype, device = form
    return f"shape {tuple(shape)}, stride {stride}, dtype {dtype}, device {device}"


class CapturedCall:
    """One call of a recomputed operator, ready to be repeated."""

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
        """How many tensors it saved on its way."""
        self.collective = False
        self.pending = 0
        self.wanted: list[int] = []
        self.wanted_insides: list[int] = []
        self.forms: list[Form | None] = []
        """Of what it gave."""
        self.inside_forms: dict[int, Form | None] = {}
        """Of what it saved on its way, where that is wanted."""
        self.outputs: dict[int, Tensor] | None = None
        self.insides: dict[int, Tensor] = {}

    def hold(self, args: tuple[Any, ...], kwargs: dict[str, Any], registry: Registry) -> None:
        """Remember the arguments, with references in place of what captured calls produced.

        A tensor that is given twice is one tensor when the call is replayed: functions ask whether ``key is query``.
        """
        same: dict[int, Any] = {}

        def hold(value: Any) -> Any:
            held = same.get(id(value))
            if held is None:
                held = same[id(value)] = registry.hold(value)
            return held

        self.args = tuple([mapped(value, hold, PLAIN) for value in args])
        self.kwargs = mapped(kwargs, hold, PLAIN) if kwargs else kwargs

    def want_output(self, index: int) -> None:
        """Something outstanding refers to an output."""
        self.pending += 1
        if index not in self.wanted:
            self.wanted.append(index)

    def want_inside(self, place: int, tensor: Tensor | None = None) -> None:
        """Something outstanding refers to a tensor, ``tensor``, that the call saves on its way."""
        self.pending += 1
        self.wanted_insides.append(place)
        if tensor is not None:
            self.inside_forms[place] = form_of_tensor(tensor)

    def output(self, index: int) -> Tensor:
        """An output, rebuilt if it is not there."""
        if self.outputs is None:
            self._rebuild()
        assert self.outputs is not None
        return self.outputs[index]

    def inside(self, place: int) -> Tensor:
        """What the call saves on its way, rebuilt if it is not there."""
        if self.outputs is None:
            self._rebuild()
        return self.insides[place]

    def reissue(self) -> None:
        """Take part in the collective again, whoever needs the result. See [Note: re-issued collectives]."""
        if self.outputs is None:
            self._rebuild()

    def release(self) -> None:
        """One reference was used; with the last one the results go. Those of a collective go with the graph."""
        self.pending -= 1
        if self.pending <= 0 and not self.collective:
            self.outputs, self.insides = None, {}

    def _rebuild(self) -> None:
        same: dict[int, Any] = {}

        def argument(value: Any) -> Any:
            if id(value) not in same:
                same[id(value)] = self._argument(value)
            return same[id(value)]

        args = [mapped(value, argument, _ARGUMENTS) for value in self.args]
        kwargs = mapped(self.kwargs, argument, _ARGUMENTS) if self.kwargs else self.kwargs
        begin = self.ledger.begin(self.device)
        contexts = [*restored(self.ambient), *autocast_contexts(self.autocast)]
        saved: list[Tensor] = []
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
        before = torch.is_grad_enabled()
        set_grad_enabled(True)  # with gradients, as in forward: a kernel may be chosen by that
        try:
            if contexts:
                with ExitStack() as stack:
                    for context in contexts:
                        stack.enter_context(context)
                    result = self.function(*args, **kwargs)
            else:
                result = self.function(*args, **kwargs)
            if self.collective:
                result = finish_collective(result)
        finally:
            set_grad_enabled(before)
        self.ledger.end(self.line, self.device, begin)
        self.line.recomputes += 1
        produced = [result] if type(result) is Tensor else tensors_of(result)
        if len(produced) != len(self.forms):
            raise RebuildError(
                f"{self.line.whose} cannot be recomputed: it gave {len(self.forms)} tensors when it ran, and"
                f" {len(produced)} when it was replayed; keep this operator"
            )
        if self.wanted_insides and len(saved) != self.saved:
            raise RebuildError(
                f"{self.line.whose} cannot be recomputed: it saved {self.saved} tensors for backward when it ran, and"
                f" {len(saved)} when it was repeated; keep this operator"
            )
        for index in self.wanted:
            _compare(produced[index], self.forms[index], self.line.whose)
        for place in self.wanted_insides:
            _compare(saved[place], self.inside_forms.get(place), self.line.whose)
        self.outputs = {index: produced[index].detach() for index in self.wanted}
        self.insides = {place: saved[place] for place in self.wanted_insides}

    def _argument(self, value: Any) -> Any:
        if type(value) is _Held:
            tensor = value.tensor
            if not isinstance(tensor, Tensor):
                return unpack(tensor).detach().requires_grad_(value.requires_grad)
            if version_of(tensor) != value.version:
                raise RebuildError(
                    f"{self.line.whose} cannot be recomputed: one of its inputs was"
                    f" changed in place after it ran (version {version_of(tensor)}, expected {value.version});"
                    " keep this operator"
                )
            return tensor  # the graph that grows on it is dropped at once
        if type(value) is _Referred:
            rebuilt = value.source.tensor()
            return rebuilt.detach().requires_grad_() if value.requires_grad else rebuilt
        return value.again(self.line.whose) if type(value) is Copied else value


class Registry:
    """The outputs of captured calls that are alive while a layer runs."""

    __slots__ = ("entries", "held", "parts", "storages")

    def __init__(self) -> None:
        self.entries: dict[int, tuple[weakref.ReferenceType[Tensor], CapturedCall, int, int]] = {}
        self.storages: dict[int, tuple[StorageWeakRef, CapturedCall, int, Tensor, int]] = {}
        """By storage: a reference to it, whose output it holds, and the output's count of writes, now and then."""
        self.parts = dist.is_available() and dist.is_initialized()
        """Whether plain tensors may be saved as the local parts of DTensors, which autograd does not know of."""
        self.held: list[_Held] = []

    def add(self, call: CapturedCall, output: Any, given: list[Tensor]) -> None:
        """Remember what ``call`` produced; an output that is one of its inputs, or a view of one, is no product."""
        made = (output,) if type(output) is Tensor else tensors_of(output)
        call.forms = [form_of_tensor(tensor) for tensor in made]
        for index, tensor in enumerate(made):
            base = tensor._base
            for one in given:
                if tensor is one or (base is not None and (base is one or base is one._base)):
                    break
            else:
                self.entries[id(tensor)] = (weakref.ref(tensor), call, index, version_of(tensor))
                if self.parts or type(tensor) is not Tensor:  # others are known by the object or its views
                    writes = count_of_writes(inner_tensor(tensor))
                    self.storages[storage_key(tensor)] = (weak_storage(tensor), call, index, writes, writes._version)

    def find(self, tensor: Tensor) -> Produced | None:
        """The output that ``tensor`` is, or is a view of; None if it has been written to since."""
        entry = self.entries.get(id(tensor))
        if entry is not None and entry[0]() is tensor:
            return Produced(entry[1], entry[2], None) if version_of(tensor) == entry[3] else None
        base = tensor._base
        if base is None:
            return None
        entry = self.entries.get(id(base))
        if entry is None or entry[0]() is not base or version_of(tensor) != entry[3]:
            return None
        return Produced(entry[1], entry[2], View.by(tensor))

    def find_by_storage(self, tensor: Tensor) -> Produced | None:
        """As :meth:`find`, for what is neither the object nor a view that autograd knows of, such as a local part.

        The object that the call returned may be gone, or not yet: see [Note: re-issued collectives].
        """
        if not self.storages or (entry := self.storages.get(storage_key(tensor))) is None:
            return None
        alive, call, index, writes, version = entry
        # A view that was made below autograd counts its writes by itself, from zero.
        if alive.expired() or writes._version != version or inner_tensor(tensor)._version not in (version, 0):
            return None
        return Produced(call, index, View.by(tensor))

    def hold(self, tensor: Any) -> Any:
        """What a captured call holds in place of an argument."""
        if not isinstance(tensor, Tensor):
            if is_shared(tensor):
                return tensor
            copied = Copied(tensor)
            return tensor if copied.value is tensor and not copied.tensors else copied
        source = (self.find(tensor) or self.find_by_storage(tensor)) if self.entries else None
        if source is None:
            held = _Held(tensor)
            self.held.append(held)
            return held
        source.call.want_output(source.output)
        return _Referred(source, tensor.requires_grad)

    def send_away(self, away: Callable[[Tensor], Saved | None]) -> None:
        """Let go of held arguments that are swapped: they come back from there."""
        for held in self.held:
            tensor = held.tensor
            if isinstance(tensor, Tensor) and version_of(tensor) == held.version:
                saved = away(tensor)
                if saved is not None:
                    held.requires_grad, held.tensor = tensor.requires_grad, saved


def _never(place: int) -> Tensor:
    raise RebuildError("a rebuilt graph was run backward")  # it is dropped at once, so nothing can ask

"""Rebuild what an operator produced, when backward first needs it.

[Note: rebuilding]
While a layer with recomputed operators runs, each call of such an operator is captured: the function, its arguments,
the random state and autocast. Of what the call produced nothing is held. A tensor that autograd wants to save is
replaced by a reference:

- ``Produced``: an output of a captured call, or a view of one;
- ``Inside``: a tensor the call itself saved on its way, by its place among all that it saved;
- ``Cast``: a cast of an output to another dtype, as autocast makes them.

When backward asks for one, the call is repeated from its arguments and everything asked for comes out of that one
repetition. An argument that another captured call produced is itself a reference, so a chain is rebuilt from its
start, each call once. A call forgets its results when nothing outstanding needs them.

Values are never guessed: arguments and random state are those of this very call. What a tensor *is* (an output, a
parameter, something inside) is known from its storage, which is alive while it is being saved, and for casts and
insides from its place in the layer's learnt list, after comparing operator, dtype and rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from lowtide._torch_private import (
    PLAIN,
    StorageWeakRef,
    autocast_contexts,
    autocast_state,
    storage_key,
    weak_storage,
)
from lowtide.errors import RebuildError
from lowtide.operators.calls import mapped, tensors_of
from lowtide.runtime.ledger import Ledger, Line
from lowtide.runtime.saved import Saved

__all__ = ["CapturedCall", "Cast", "Inside", "Produced", "Reference", "Registry"]


class Produced(NamedTuple):
    """An output of a captured call, seen through a view."""

    call: CapturedCall
    output: int
    view: tuple[torch.Size, tuple[int, ...], int] | None
    """The view's shape, stride and offset; None for the output itself."""

    def here(self) -> Tensor:
        """The tensor, rebuilt if it is not there."""
        tensor = self.call.output(self.output)
        return tensor if self.view is None else tensor.as_strided(*self.view)

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


Reference: TypeAlias = Produced | Inside | Cast


class _Held:
    """An argument that is held as it is. No tuple: nested values must take it for a leaf."""

    __slots__ = ("away", "requires_grad", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.version, self.requires_grad = tensor._version, tensor.requires_grad
        self.away: Saved | None = None
        """Where it is now, if it was swapped after it was captured."""


class _Referred:
    """An argument that another captured call produced."""

    __slots__ = ("requires_grad", "source")

    def __init__(self, source: Produced, requires_grad: bool) -> None:
        self.source, self.requires_grad = source, requires_grad


_ARGUMENTS = (_Held, _Referred)


class CapturedCall:
    """One call of a recomputed operator, ready to be repeated."""

    __slots__ = (
        "arguments", "autocast", "device", "function", "insides", "ledger", "line", "name", "outputs", "pending",
        "random", "wanted", "wants_insides",
    )  # fmt: skip

    def __init__(
        self, name: str, function: Callable[..., Any], arguments: Any, given: list[Tensor], line: Line, ledger: Ledger,
        *, random: bool,
    ) -> None:  # fmt: skip
        self.name, self.function, self.arguments = name, function, arguments
        self.line, self.ledger = line, ledger
        self.device = given[0].device if given else torch.device("cpu")
        self.autocast = autocast_state()
        self.random = _RandomState(given) if random else None
        self.pending = 0
        self.wanted: set[tuple[str, int]] = set()
        self.outputs: dict[int, Tensor] | None = None
        self.insides: dict[int, Tensor] = {}
        self.wants_insides = False

    def want(self, kind: str, index: int) -> None:
        """Something outstanding refers to an output or an inside of this call."""
        self.pending += 1
        self.wanted.add((kind, index))
        self.wants_insides |= kind == "inside"

    def output(self, index: int) -> Tensor:
        self._rebuild()
        assert self.outputs is not None
        return self.outputs[index]

    def inside(self, place: int) -> Tensor:
        self._rebuild()
        return self.insides[place]

    def release(self) -> None:
        """One reference was used; with the last one the results go."""
        self.pending -= 1
        if self.pending <= 0:
            self.outputs, self.insides = None, {}

    def _rebuild(self) -> None:
        if self.outputs is not None:
            return
        args, kwargs = mapped(self.arguments, self._argument, _ARGUMENTS)
        begin = self.ledger.begin(self.device)
        contexts = autocast_contexts(self.autocast)
        saved: list[Tensor] = []
        if self.wants_insides:

            def pack(tensor: Tensor) -> int:
                # Detached: the graph holds this function, which holds the list, which must not hold the graph.
                saved.append(tensor.detach())
                return len(saved) - 1

            contexts.append(saved_tensors_hooks(pack, _never))
        if self.random is not None:
            contexts.append(self.random.restored())
        with torch.enable_grad():
            if contexts:
                with ExitStack() as stack:
                    for context in contexts:
                        stack.enter_context(context)
                    produced = tensors_of(self.function(*args, **kwargs))
            else:
                produced = tensors_of(self.function(*args, **kwargs))
        self.ledger.end(self.line, self.device, begin)
        self.line.recomputes += 1
        self.outputs = {index: produced[index].detach() for kind, index in self.wanted if kind == "output"}
        self.insides = {index: saved[index] for kind, index in self.wanted if kind == "inside"}

    def _argument(self, value: Any) -> Any:
        if isinstance(value, _Held):
            if value.away is not None:
                return value.away.tensor().detach().requires_grad_(value.requires_grad)
            assert value.tensor is not None
            if value.tensor._version != value.version:
                raise RebuildError(
                    f"{self.name} cannot be recomputed: one of its inputs was changed in place after it ran"
                    f" (version {value.tensor._version}, expected {value.version}); keep this operator"
                )
            return value.tensor  # the graph that grows on it is dropped at once
        if isinstance(value, _Referred):
            tensor = value.source.tensor()
            return tensor.detach().requires_grad_() if value.requires_grad else tensor
        return value


class Registry:
    """The outputs of captured calls that are alive while a layer runs, by storage."""

    def __init__(self) -> None:
        self.entries: dict[int, tuple[StorageWeakRef, CapturedCall, int, int, Any]] = {}
        self.held: list[_Held] = []

    def add(self, call: CapturedCall, outputs: list[Tensor], given: set[int]) -> None:
        """Remember what ``call`` produced; an output that shares an input's storage is no product of its own."""
        for index, tensor in enumerate(outputs):
            key = storage_key(tensor)
            if key not in given:
                layout = (tensor.shape, tensor.stride(), tensor.storage_offset())
                self.entries[key] = (weak_storage(tensor), call, index, tensor._version, layout)

    def find(self, tensor: Tensor) -> Produced | None:
        """The output that ``tensor`` is, or is a view of; None if it has been written to since."""
        entry = self.entries.get(storage_key(tensor))
        if entry is None:
            return None
        alive, call, index, version, layout = entry
        if alive.expired() or tensor._version != version:
            return None
        view = (tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        return Produced(call, index, None if view == layout else view)

    def send_away(self, away: Callable[[Tensor], Saved | None]) -> None:
        """Let go of held arguments that are swapped: they come back from there."""
        for held in self.held:
            if held.tensor is not None and held.tensor._version == held.version:
                held.away = away(held.tensor)
                if held.away is not None:
                    held.tensor = None

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of a call, with references in place of what captured calls produced."""
        return mapped((args, kwargs), self._hold, PLAIN)

    def _hold(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        source = self.find(value)
        if source is None:
            self.held.append(_Held(value))
            return self.held[-1]
        source.call.want("output", source.output)
        return _Referred(source, value.requires_grad)


class _RandomState:
    """The random numbers' state before a call, on the host and on the devices of its arguments."""

    def __init__(self, given: list[Tensor]) -> None:
        self.host = torch.get_rng_state()
        self.devices, self.states = get_device_states(*given)
        kinds = {tensor.device.type for tensor in given} - {"cpu"}
        self.kind = kinds.pop() if kinds else "cuda"

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The random numbers as they were; afterwards they go on from where they are now."""
        with torch.random.fork_rng(devices=self.devices, device_type=self.kind):
            torch.set_rng_state(self.host)
            if self.devices:
                set_device_states(self.devices, self.states, device_type=self.kind)
            yield


def _never(place: int) -> Tensor:
    raise RebuildError("a rebuilt graph was run backward")  # it is dropped at once, so nothing can ask

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

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from lowtide._torch_private import (
    StorageWeakRef,
    autocast_contexts,
    finish_collective,
    inner_tensor,
    landed_tensor,
    storage_key,
    subclass_wrapper,
    tree_map,
    version_of,
    weak_storage,
)
from lowtide.errors import RebuildError
from lowtide.operators.calls import tensors_of
from lowtide.runtime.ledger import Ledger, Line
from lowtide.runtime.saved import Saved

__all__ = ["CapturedCall", "Cast", "Inside", "Produced", "Reference", "Registry"]


class Produced(NamedTuple):
    """An output of a captured call, seen through a view."""

    call: CapturedCall
    output: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    wrap: Callable[[Tensor], Tensor] | None
    """Makes a tensor subclass, such as a DTensor, of what was rebuilt; None where it was plain."""

    def view(self) -> Tensor:
        """The tensor, rebuilt if it is not there. A view of a subclass is one of the plain tensor that it holds."""
        whole = landed_tensor(self.call.output(self.output))
        if whole.dtype is self.dtype:
            part = whole.as_strided(self.size, self.stride, self.offset)
        else:  # real numbers seen as complex, or the reverse
            empty = torch.empty(0, dtype=self.dtype, device=whole.device)
            part = empty.set_(whole.untyped_storage(), self.offset, self.size, self.stride)
        return part if self.wrap is None else self.wrap(part)

    def tensor(self) -> Tensor:
        tensor = self.view()
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
        tensor = self.source.view().to(self.dtype).view(self.size)
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


class CapturedCall:
    """One call of a recomputed operator, ready to be repeated."""

    __slots__ = (
        "arguments", "autocast", "function", "insides", "ledger", "line", "name", "outputs", "pending", "random",
        "wanted",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: Any,
        line: Line,
        ledger: Ledger,
        *,
        random: list[Tensor] | None,
    ) -> None:
        self.name, self.function, self.arguments = name, function, arguments
        self.line, self.ledger = line, ledger
        self.autocast = autocast_contexts()
        self.random = _RandomState(random) if random is not None else None
        self.pending = 0
        self.wanted: set[tuple[str, int]] = set()
        self.outputs: dict[int, Tensor] | None = None
        self.insides: dict[int, Tensor] = {}

    def want(self, kind: str, index: int) -> None:
        """Something outstanding refers to an output or an inside of this call."""
        self.pending += 1
        self.wanted.add((kind, index))

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
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> int:
            # Detached: the graph holds this function, which holds the list, which must not hold the graph.
            saved.append(tensor.detach())
            return len(saved) - 1

        args, kwargs = tree_map(self._argument, self.arguments)
        device = next((tensor.device for tensor in tensors_of((args, kwargs))), torch.device("cpu"))
        begin = self.ledger.begin(device)
        with ExitStack() as stack:
            for context in self.autocast():
                stack.enter_context(context)
            if self.random is not None:
                stack.enter_context(torch.random.fork_rng(devices=self.random.devices, device_type=self.random.kind))
                self.random.restore()
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, _never))
            result = finish_collective(self.function, self.function(*args, **kwargs))
        self.ledger.end(self.line, "recompute", device, begin)
        self.line.recomputes += 1
        produced = tensors_of(result)
        self.outputs = {i: produced[i].detach() for kind, i in self.wanted if kind == "output"}
        self.insides = {i: saved[i] for kind, i in self.wanted if kind == "inside"}

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
            return value.tensor.detach().requires_grad_(value.requires_grad)
        if isinstance(value, _Referred):
            return value.source.tensor().detach().requires_grad_(value.requires_grad)
        return value


class Registry:
    """The outputs of captured calls that are alive while a layer runs, by storage."""

    def __init__(self) -> None:
        self.entries: dict[int, tuple[StorageWeakRef, CapturedCall, int, int]] = {}
        self.held: list[_Held] = []

    def add(self, call: CapturedCall, outputs: list[Tensor], given: set[int]) -> None:
        """Remember what ``call`` produced; an output that shares an input's storage is no product of its own."""
        for index, tensor in enumerate(outputs):
            key = storage_key(tensor)
            if key not in given:
                self.entries[key] = (weak_storage(tensor), call, index, version_of(tensor))

    def find(self, tensor: Tensor) -> Produced | None:
        """The output that ``tensor`` is, or is a view of; None if it has been written to since."""
        entry = self.entries.get(storage_key(tensor))
        if entry is None:
            return None
        alive, call, index, version = entry
        if alive.expired() or version_of(tensor) != version:
            return None
        wrap = subclass_wrapper(tensor)
        plain = tensor if wrap is None else inner_tensor(tensor)
        size, offset = tuple(plain.shape), int(plain.storage_offset())
        return Produced(call, index, size, plain.stride(), offset, plain.dtype, wrap)

    def send_away(self, away: Callable[[Tensor], Saved | None]) -> None:
        """Let go of held arguments that are swapped: they come back from there."""
        for held in self.held:
            if held.tensor is not None:
                held.away = away(held.tensor)
                if held.away is not None:
                    held.tensor = None

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of a call, with references in place of what captured calls produced."""
        return tree_map(self._hold, (args, kwargs))

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
    """The random numbers' state before a call, on the host and on the devices of the tensors it was given."""

    def __init__(self, given: list[Tensor]) -> None:
        self.host = torch.get_rng_state()
        self.devices, self.states = get_device_states(*given)
        kinds = {tensor.device.type for tensor in given} - {"cpu"}
        self.kind = kinds.pop() if kinds else "cuda"

    def restore(self) -> None:
        torch.set_rng_state(self.host)
        if self.devices:
            set_device_states(self.devices, self.states, device_type=self.kind)


def _never(place: int) -> Tensor:
    raise RebuildError("a rebuilt graph was run backward")  # it is dropped at once, so nothing can ask

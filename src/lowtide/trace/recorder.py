"""Record what runs: every kernel, every storage's beginning and end, every tensor saved for backward.

[Note: recording]
A TorchDispatchMode sees the kernels, in forward and, since it is active on autograd's threads too, in backward. A
storage is known from the first kernel that returns it; a weak reference to the storage object says when it ends, at
the very moment, whatever held it last. What autograd saves goes through hooks.

In forward the recorder wants to see how long the program itself holds a storage, as if nothing were saved. So with fake
tensors a hook keeps only a tensor's shape, and makes another fake tensor when backward unpacks it: one run shows both.
Real tensors are needed in backward. They can be held somewhere else meanwhile, such as in the host's memory, and then
too one run shows both. If they stay where they are, one run saves nothing and shows the forward, and a second one shows
the backward; both do the same, and the recorder checks that they do.

Where two gradients meet, autograd adds the second into the first if nothing else holds that, but not under a mode: then
it makes a new tensor. The recorder sees that it happens outside of every node; see :mod:`lowtide.trace.in_place`.

Sharded parameters are freed by resizing their storage, which is no kernel: that is watched apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from lowtide._torch_private.backward import backward_node_number
from lowtide._torch_private.modes import TorchDispatchMode, insert_dispatch_mode, remove_dispatch_mode
from lowtide._torch_private.nodes import node_number
from lowtide._torch_private.operators import schema_of
from lowtide._torch_private.saved_tensor_hooks import (
    hooks_on_top,
    insert_saved_tensors_hooks,
    remove_saved_tensors_hooks,
)
from lowtide._torch_private.storages import resize_watchers, storage_address, storage_key, storage_of
from lowtide._torch_private.streams import watch_cpu_streams
from lowtide._torch_private.subclasses import Subclass, taken_apart
from lowtide._torch_private.versions import written_arguments
from lowtide._torch_private.views import view_base
from lowtide.cost.kernels import kernel_flops
from lowtide.cost.shape import shape_text
from lowtide.cost.stopwatch import seconds_between
from lowtide.operators.calls import tensors_of
from lowtide.operators.formulas import Formulas, has_two_formulas
from lowtide.operators.saved import PackHook, Saved, kept_apart
from lowtide.operators.wrappers import take_back
from lowtide.trace.clock import Clock
from lowtide.trace.layout import group_channel
from lowtide.trace.streams import Streams
from lowtide.trace.trace import Event, Sync, What
from lowtide.trace.traffic import Communication, bytes_read, communication, computed_in

__all__ = ["Mark", "Occasion", "Place", "RecordedKernel", "Recorder", "Storage", "imagined"]

LOSS = "loss"
"""What runs after the layers and is no operator of the model."""
Phase: TypeAlias = Literal["forward", "backward", "optimizer"]
Occasion: TypeAlias = Literal["kernel", "saved", "gradient"]
"""A kernel is about to run; backward unpacks a saved tensor; backward reaches a part."""
Place: TypeAlias = tuple[Phase, int]
"""Where something happens: the phase, and the part: -1 is before the layers, their number after them."""


@dataclass(slots=True)
class Storage:
    """A storage that was made while recording."""

    size: int
    made: Place
    operator: str = ""
    """The operator that ran when it was made."""


class RecordedKernel(NamedTuple):
    """A kernel, its storages by their number in the whole recording."""

    kind: str
    operator: str
    dtype: str
    flops: int
    touched: int
    shape: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    sent: Communication
    stream: int
    waited: bool
    time: tuple[Any, Any] | None
    """When it began and ended, where that was asked for."""

    @property
    def seconds(self) -> float:
        """How long it took; the device must have come to its end."""
        begin, end = self.time or (0.0, 0.0)
        return seconds_between(begin, end)


@dataclass(slots=True)
class _Call:
    operator: str
    inputs: tuple[int, ...]
    nodes: range = field(default_factory=lambda: range(0))
    """The numbers of the autograd nodes that it made."""


class Mark(NamedTuple):
    """How much had been recorded at one moment."""

    events: dict[Place, int]
    kernels: int
    storages: int


class Recorder(TorchDispatchMode):
    """Records one micro-batch: enter it, say where the model is with :meth:`move`, run."""

    def __init__(
        self,
        parts: int,
        *,
        hold: PackHook | None,
        written: Callable[[list[Tensor]], None] = lambda tensors: None,
        device: str = "cpu",
        timed: bool = False,
        streams: bool = False,
    ) -> None:
        super().__init__()
        self.device = device
        """The kind of device that is recorded: what another, such as the host, holds and does is left out."""
        self.hooks = self.pack
        """What is on torch's stack of hooks."""
        self.hold = hold
        """How what is saved for backward is held; None: not at all, and then there is no backward."""
        self.written = written
        """Called with what a kernel has written into: it may have been saved before."""
        self.clock = Clock() if timed else None
        self.formulas = Formulas(self)
        self.paused = False
        """Whether what happens now is not to be recorded."""
        self.attend: Callable[[Occasion], None] = lambda occasion: None
        """Called before a kernel runs and where backward reaches something that was recorded: see
        :mod:`lowtide.trace.phases`."""
        self.streams: dict[Place, list[Event]] = {}
        self.storages: list[Storage] = []
        self.kernels: list[RecordedKernel] = []
        self.calls: list[_Call] = []
        self.syncs: list[Sync] = []
        self.queues = Streams(self._sync) if streams else None
        """The streams that kernels are issued on; None where one is taken for all."""
        self.under_way: dict[int, int] = {}
        """For each storage that a collective fills, and that was not waited for, the collective's kernel."""
        self.saved: list[tuple[int, Place, str, bool]] = []
        """For each tensor that was saved: its storage, where, by which operator, and whether it can be moved."""
        self.known: dict[int, int] = {}
        self.references: dict[int, Any] = {}
        self.static: set[int] = set()
        """The keys of storages that were there before: parameters, buffers, optimizer states."""
        self.given: dict[int, int] = {}
        """The sizes of other storages that were there before and still are: the batch."""
        self.result = -1
        """The storage of the model's own output."""
        self.managed: set[int] = set()
        """The keys of storages that are freed by hand, whatever still holds them: gathered parameters."""
        self.gradients: set[int] = set()
        """The storages that became gradients of parameters."""
        self.passed: dict[int, int] = {}
        """For each part the storage that it passes to the next in forward; -1 is what comes before the layers."""
        self.passed_back: dict[int, int] = {}
        """For each part the storage of the gradient that it is given in backward."""
        self.open: _Call | None = None
        self.last = parts
        self.quiet = False
        self.meeting = False
        """Whether backward runs between two nodes, where gradients meet."""
        self.wrapped = False
        """Whether what runs next is done for a subclass."""
        self.into: dict[int, tuple[int, int]] = {}
        """For each kernel that would be done in place without a mode: where, and the storage that it made instead."""
        self.events: list[Event] = []
        self.place: Place = ("forward", -1)
        self.next: Place | None = None
        self.move("forward", -1)

    # Where we are.

    def move(self, phase: Phase, part: int) -> None:
        """What follows happens there."""
        self.place = (phase, part)
        self.events = self.streams.setdefault(self.place, [])
        self.next = None

    def leave(self, phase: Phase, part: int) -> None:
        """As :meth:`move`, but what is only freed until something happens again still happened here."""
        self.next = (phase, part)

    def note(self, what: What, number: int) -> None:
        """Something happens here and now."""
        if self.paused:
            return
        if self.next is not None and what not in ("free", "done"):
            self.move(*self.next)
        self.events.append((what, number))

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Record all that runs inside."""
        try:
            resize_watchers.add(self._around_resize)
            insert_saved_tensors_hooks(self.hooks, self.unpack)
            insert_dispatch_mode(self)
            with watch_cpu_streams(self.queues) if self.queues is not None else nullcontext():
                yield self
        finally:
            take_back([self.take_off])
            self.references.clear()
            if self.clock is not None:
                self.clock.close()

    def take_off(self) -> None:
        """Stop recording; does nothing if it is not on."""
        remove_dispatch_mode(self)
        self.formulas.settle()
        remove_saved_tensors_hooks(self.hooks)
        resize_watchers.remove(self._around_resize)

    @property
    def is_intercepting(self) -> bool:
        """Whether our hooks see what is saved now; the user's own may be on top."""
        return hooks_on_top(self.hooks)

    # Which operator runs.

    @property
    def in_forward(self) -> bool:
        """Whether this is the forward that is recorded."""
        return not self.paused and self.place[0] == "forward"

    def call_begins(self, operator: str, given: Any) -> None:
        """A call of an operator begins."""
        inputs = dict.fromkeys(self.number(tensor) for tensor in tensors_of(given))
        self.open = _Call(operator, tuple(one for one in inputs if one >= 0), range(node_number(), node_number()))
        self.note("call", len(self.calls))
        self.calls.append(self.open)

    def call_ends(self) -> None:
        """The call that is open has ended."""
        assert self.open is not None
        self.open.nodes = range(self.open.nodes.start, node_number())
        self.note("end", len(self.calls) - 1)
        self.open = None

    @property
    def operator(self) -> str:
        """The operator that runs, or whose gradient is being computed."""
        if self.open is not None:
            return self.open.operator
        outside = LOSS if self.place[1] == self.last else ""
        if self.place[0] != "backward":
            return outside
        number = backward_node_number()
        return next((call.operator for call in reversed(self.calls) if number in call.nodes), outside)

    # Storages.

    def number(self, tensor: Tensor) -> int:
        """The storage's number; -1 for one that was there before, and for a parameter's."""
        return self.known.get(storage_key(tensor), -1)

    def see(self, tensor: Tensor) -> int:
        """A storage is seen: if for the first time, it was made now."""
        storage = storage_of(tensor)
        key = storage_address(storage)
        if key in self.known or key in self.static or not self._is_here(tensor):
            return self.known.get(key, -1)
        return self._begun(storage, storage.nbytes())

    def _was_there(self, tensor: Tensor) -> None:
        """A storage that is not known is held outside; unless it is freed here, it stays over the step."""
        storage = storage_of(tensor)
        key = storage_address(storage)
        known = key in self.known or key in self.static or key in self.given
        if known or not self._is_here(tensor) or (tensor.is_cpu and tensor.dim() == 0):
            return
        self.given[key] = storage.nbytes()
        self.references[key] = weakref.ref(storage, lambda _: self.given.pop(key, None))

    def forget(self, tensor: Tensor) -> None:
        """A storage that was taken to be made is there for good."""
        key = storage_key(tensor)
        self.static.add(key)
        number = self.known.pop(key, None)
        if number is not None and self.references.pop(key, None) is not None:
            self.streams[self.storages[number].made].remove(("make", number))

    def _is_here(self, tensor: Tensor) -> bool:
        return tensor.device.type in (self.device, "meta")

    def _begun(self, storage: torch.UntypedStorage, size: int) -> int:
        if self.next is not None:
            self.move(*self.next)
        key, number = storage_address(storage), len(self.storages)
        self.storages.append(Storage(size, self.place, operator=self.operator))
        self.known[key] = number
        self.references[key] = weakref.ref(storage, lambda _: self._ended(key, number))
        self.note("make", number)
        return number

    def _ended(self, key: int, number: int) -> None:
        if self.known.get(key) == number:
            del self.known[key]
            if self.references.pop(key, None) is not None:
                self.note("free", number)

    def _around_resize(self, resize: Callable[[Any, int], Any], storage: Any, size: int) -> Any:
        self._resized(storage, size)
        return resize(storage, size)

    def _resized(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage_address(storage)
        number = self.known.get(key, -1)
        if self.quiet or key in self.static:
            return
        if size and not storage.nbytes():
            self.managed.add(key)
            if not self.paused:
                self._begun(storage, size)  # another one, as far as memory goes
        elif not size and storage.nbytes() and number >= 0:
            self._ended(key, number)

    # Kernels.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.quiet:
            self.attend("kernel")
        if self.quiet:
            return func(*args, **kwargs)
        if self.formulas.results:
            self.formulas.settle()
        if self.paused:
            result = func(*args, **kwargs)
            if schema_of(func).is_mutable:
                self.written(tensors_of(written_arguments(func, args, kwargs)))
            if has_two_formulas(func):
                self.formulas.note(result)
            return result
        if any(getattr(kind, "__name__", "") in _WRAPPERS for kind in types):
            self.wrapped = True
            return NotImplemented  # the subclass unwraps itself: its plain tensors are dispatched here next
        wrapped, self.wrapped = self.wrapped, False
        begin = self.clock.begin(args, kwargs) if self.clock is not None else None
        result = func(*args, **kwargs)
        end = self.clock.end(begin) if self.clock is not None else None
        if has_two_formulas(func):
            self.formulas.note(result)
        if func.is_view:
            return result
        if schema_of(func).name in _WAITS:
            self._wait_for([self.number(tensor) for tensor in tensors_of((args, kwargs))])
            return result
        given, made = tensors_of((args, kwargs)), tensors_of(result)
        changed = tensors_of(written_arguments(func, args, kwargs))
        self.written(changed)
        before = {storage_key(tensor) for tensor in given}
        for tensor in given if self.place[0] != "optimizer" else ():
            self._was_there(tensor)
        reads = tuple(dict.fromkeys(number for number in map(self.number, given) if number >= 0))
        if not any(map(self._is_here, [*given, *made])):
            return result
        for tensor in made:
            self.see(tensor)
        sent = communication(func, args, kwargs, [*given, *made])
        if sent.ranks:
            changed = changed or made  # a collective's schema does not say what it fills
        fresh = [tensor for tensor in made if storage_key(tensor) not in before]
        if schema_of(func).name in _FREE or not (fresh or changed):
            return result
        writes = tuple(dict.fromkeys(self.number(tensor) for tensor in [*fresh, *changed]))
        waited = sent.ranks == 0 or func.namespace == "c10d" or self.queues is None
        kernel = RecordedKernel(
            schema_of(func).name,
            self.operator,
            computed_in(given or made),
            kernel_flops(schema_of(func).name, args, kwargs, result),
            sum(map(bytes_read, given)) + sum(map(bytes_read, fresh)),
            "" if sent.ranks else shape_text(args, kwargs),
            reads,
            tuple(number for number in writes if number >= 0),
            sent,
            self.queues.current if self.queues is not None else 0,
            waited,
            (begin, end) if self.clock is not None else None,
        )
        if kernel.kind in _COPYING:
            # It reduces a copy of what it is given. Around the call, events on the current stream time the copy.
            self._ran(
                kernel._replace(
                    kind="aten::clone", shape=shape_text((given[0],), {}), sent=Communication(), waited=True
                )
            )
        adds = self.meeting and kernel.kind == "aten::add" and len(given) == 2 and not wrapped
        if (adds and view_base(given[0]) is None) or (not self.meeting and kernel.kind in _FILLING):
            self.into[len(self.kernels)] = (self.number(given[0]), self.number(made[0]))
        if not waited:
            self.under_way |= dict.fromkeys(kernel.writes, len(self.kernels))
        self._ran(kernel)
        return result

    def _ran(self, kernel: RecordedKernel) -> None:
        self.note("run", len(self.kernels))
        self.kernels.append(kernel)

    def _sync(self, sync: Sync) -> None:
        """Streams wait for each other."""
        if not self.quiet:
            self.note("sync", len(self.syncs))
            self.syncs.append(sync)

    def _wait_for(self, storages: Sequence[int]) -> None:
        """The current stream waits for collectives that fill storages: at once, for one that was issued just now."""
        for number in dict.fromkeys(self.under_way.pop(storage, -1) for storage in storages):
            if number >= 0 and self.events[-1:] == [("run", number)]:
                self.kernels[number] = self.kernels[number]._replace(waited=True)
            elif number >= 0:
                ranks, stride, _ = self.kernels[number].sent
                stream = self.queues.current if self.queues is not None else 0
                self._sync(Sync(stream, group_channel(ranks, stride)))

    # Between nodes.

    def follow(self, node: Any) -> None:
        """Notice, from that node on, when backward is inside a node and when it is between two."""
        waiting, seen = [node], set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            node.register_prehook(self._enter_node)
            node.register_hook(self._leave_node)
            waiting += [following for following, _ in node.next_functions]

    def _enter_node(self, _: Any) -> None:
        self.meeting = False

    def _leave_node(self, *_: Any) -> None:
        self.meeting = True

    def mark(self) -> Mark:
        """How much has been recorded."""
        return Mark(
            {place: len(events) for place, events in self.streams.items()}, len(self.kernels), len(self.storages)
        )

    def take_back(self, mark: Mark) -> None:
        """Forget what was recorded since then; no storage from before has ended, nor was anything saved."""
        for place, events in self.streams.items():
            del events[mark.events.get(place, 0) :]
        del self.kernels[mark.kernels :]
        for key, number in list(self.known.items()):
            if number >= mark.storages:
                del self.known[key]
                self.references.pop(key, None)

    def take_seed(self) -> list[Event]:
        """Discard the last event if it made the gradient that a backward begins with.

        That runs before the engine does: it was taken to be of the forward.
        """
        if [what for what, _ in self.events[-2:]] != ["make", "run"] or self.kernels[-1].kind != "aten::ones_like":
            return []
        taken = self.events[-2:]
        del self.events[-2:]
        self.storages[taken[0][1]].made = ("backward", self.last)
        return taken

    # What autograd saves.

    def pack(self, tensor: Tensor) -> _Saved:
        """Autograd saves a tensor."""
        number = len(self.saved) if not self.paused else -1
        movable = tensor.is_floating_point() or tensor.is_complex()
        key = storage_key(tensor)
        parameter = isinstance(tensor, nn.Parameter) or key in self.static or key in self.managed
        if not self.paused:
            self.saved.append(
                (-1 if parameter else self.number(tensor), self.place, self.open.operator if self.open else "", movable)
            )
            self.note("save", number)
        self.quiet = True
        try:
            if parameter:
                return _Saved(self, number, kept_apart(tensor).tensor if type(tensor) is Tensor else lambda: tensor)
            return _Saved(self, number, self.hold(tensor).tensor if self.hold is not None else None)
        finally:
            self.quiet = False

    def unpack(self, saved: _Saved) -> Tensor:
        """Autograd unpacks it."""
        if saved.number >= 0:
            self.attend("saved")
            self.note("use", saved.number)
        if saved.tensor is None:
            raise RuntimeError("this run saves nothing for backward")
        self.quiet = True
        try:
            tensor = saved.tensor()
        finally:
            self.quiet = False
        number = self.saved[saved.number][0] if saved.number >= 0 else -1
        key = storage_key(tensor)
        if number >= 0 and key not in self.known and key not in self.static:
            # An invented storage represents the one that was saved, as long as it lives.
            self.known[key] = number
            storage = storage_of(tensor)
            self.references[key] = weakref.ref(storage, lambda _: self.known.pop(key, None))
        return tensor


class _Saved:
    """What autograd holds in place of a saved tensor. When it is finalized, autograd has freed it."""

    __slots__ = ("number", "recorder", "tensor")

    def __init__(self, recorder: Recorder, number: int, tensor: Callable[[], Tensor] | None) -> None:
        self.recorder, self.number, self.tensor = recorder, number, tensor

    def __del__(self) -> None:
        if self.number >= 0:
            self.recorder.note("done", self.number)


class _Imagined(NamedTuple):
    """The form of a fake tensor."""

    make: Callable[[], Tensor]

    def tensor(self) -> Tensor:
        """Another one of the same form."""
        return self.make()


def imagined(tensor: Tensor) -> Saved:
    """Hold only the form of a fake tensor."""
    whole: Subclass | None = taken_apart(tensor)
    if whole is not None:
        parts = {name: imagined(part) for name, part in whole.tensors.items()}
        frame = whole._replace(tensors={})
        return _Imagined(lambda: frame.rebuilt({name: part.tensor() for name, part in parts.items()}))
    size, stride, dtype, device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    return _Imagined(lambda: torch.empty_strided(size, stride, dtype=dtype, device=device))


_WRAPPERS = {"DTensor", "AsyncCollectiveTensor", "NestedTensor"}
_FREE = {
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
    "aten::detach", "aten::lift_fresh",
}  # fmt: skip

_WAITS = {"_c10d_functional::wait_tensor", "_c10d_functional::wait_tensors"}

_COPYING = {"_c10d_functional::all_reduce", "_c10d_functional::all_reduce_coalesced"}

_FILLING = {"aten::index_put", "aten::scatter", "aten::scatter_add"}
"""What a node fills zeros with."""

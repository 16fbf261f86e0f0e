"""Watch a layer run once, and know its operators and the owner of every tensor it saves for backward.

An operator is a call of a leaf module (all its internals are one unit) or a torch function called directly in a
module's forward. A tensor saved for backward belongs to the operator that last wrote its value, looking through views
and dtype casts. What is derived from parameters alone is static; what comes into the layer belongs to its boundary
or, if it is not the layer's own input, to the root.

[Note: how owners are found]
Three observers work together. Wrappers of the modules' forwards and a TorchFunctionMode say which operator is running.
A TorchDispatchMode below them sees every kernel and notes, for each storage, who wrote it last: a new storage by the
kernel that made it, an old one by the kernel whose schema says that it writes there. A view shares its storage and
needs no entry. A cast makes a new storage, but the value is its input's: the entry is copied. Factories such as
``empty`` make a storage without a value and own nothing. Saved-tensor hooks then look the storage up. Storages are
known by address, and addresses are used again: an entry holds a weak reference and expires with its storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from lowtide._torch_private.backward import in_forward_mode
from lowtide._torch_private.collectives import COLLECTIVE_NAMESPACES
from lowtide._torch_private.modes import DisableTorchFunction, TorchDispatchMode, remove_dispatch_mode
from lowtide._torch_private.nodes import is_own_output
from lowtide._torch_private.saved_tensor_hooks import (
    hooks_on_top,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    remove_saved_tensors_hooks,
)
from lowtide._torch_private.storages import StorageWeakRef, has_storage, storage_bytes, storage_key, weak_storage
from lowtide._torch_private.subclasses import PLAIN
from lowtide._torch_private.versions import WRITES_UNCOUNTED, count_of_writes, version_of, written_arguments
from lowtide.errors import PolicyError
from lowtide.operators.calls import CallTracker, Site, tensors_of
from lowtide.operators.observation import Call, Observation, Pack, Source
from lowtide.operators.saved import Kept, PackHook, Saved, foreign_pack_hook, kept_apart, unpack
from lowtide.operators.wrappers import take_back

__all__ = ["OnSave", "OnWrite", "Profiler", "observe"]

Result = TypeVar("Result")


class _Origin(NamedTuple):
    """Whose value a storage holds."""

    source: Source
    owner: str
    number: int
    alive: StorageWeakRef
    cast: bool


OnSave: TypeAlias = Callable[[Tensor, Source], None]
"""Called with every tensor that autograd saves while a layer runs, and whose value it is."""

OnWrite: TypeAlias = Callable[[list[Tensor]], None]
"""Called with the tensors that a kernel has written into."""


@contextmanager
def observe(
    layer: nn.Module,
    *,
    saved: OnSave | None = None,
    hold: PackHook = kept_apart,
    written: OnWrite | None = None,
    before_function: Callable[[], None] = lambda: None,
) -> Iterator[Callable[[], Observation]]:
    """Watch ``layer`` while it runs inside this context; the yielded function gives what was seen.

    ``hold`` says how what is saved for backward is held meanwhile; ``before_function`` is called before every torch
    function, and may raise.

    >>> layer = nn.Sequential(nn.Linear(4, 4), nn.SiLU())
    >>> with observe(layer) as seen:
    ...     out = layer(torch.ones(2, 4, requires_grad=True))
    >>> [(pack.operator, pack.source, pack.owner) for pack in seen().packs]
    [('0', 'boundary', ''), ('0', 'static', ''), ('1', 'operator', '0')]
    """
    profiler = Profiler(layer, saved, hold, written)
    tracker = CallTracker(layer, profiler, before_function)
    try:
        tracker.attach()
        yield profiler.result
    finally:
        take_back([tracker.detach])


class Profiler:
    """What is known while a layer runs: whose value each storage holds, and what has been saved."""

    def __init__(
        self,
        layer: nn.Module,
        saved: OnSave | None = None,
        hold: PackHook = kept_apart,
        written: OnWrite | None = None,
    ) -> None:
        self.saved, self.hold, self.tell = saved, hold, written
        self.holding = False
        """Whether a tensor is being put away: the kernels of that are not the layer's."""
        self.origins: dict[int, _Origin] = {}
        self.numbers = 0
        self.owners: dict[int, str] = {}
        self.calls: list[_OpenCall] = []
        self.packs: list[Pack] = []
        self.collectives: list[str] = []
        self.open: _OpenCall | None = None
        self.kernels: _Kernels | None = None
        self.hooks: PackHook | None = None
        """What is on torch's stack of hooks."""
        self.aside = False
        """Whether the layer is left to hooks of others, and nothing is seen. See [Note: other code's hooks]."""
        self.seen: list[tuple[int, Tensor, int, int]] = []
        """What was given by calls and saved: the number of its storage, what shares its version, that version, and how
        often the storage had been written to. See [Note: writes that are not counted]."""
        self.written: dict[int, int] = {}
        """How often each storage was written to."""
        self.altered: set[int] = set()
        for tensor in [*layer.parameters(), *layer.buffers()]:
            self.record(tensor, "static", "")

    def result(self) -> Observation:
        for call in self.calls:
            call.repeatable &= not call.made & self.altered
        calls = tuple(call.close() for call in self.calls)
        packs = tuple(pack._replace(altered=pack.storage in self.altered) for pack in self.packs)
        return Observation(calls, packs, dict(self.owners), tuple(self.collectives))

    # Which operator is running.

    def layer_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.calls, self.packs, self.collectives = [], [], []  # a layer that runs twice is known by its last run
        self.seen, self.written, self.altered = [], {}, set()
        given = tensors_of((args, kwargs))
        for tensor in given:
            self.origin(tensor)
        for tensor in given[:1]:
            self.record(tensor, "boundary", "")
        self.aside = foreign_pack_hook() is not None
        self.resume()

    def resume(self) -> None:
        """Watch kernels and saved tensors, from the beginning of the layer or again after a pause."""
        if self.aside:
            return
        if self.hooks is None:
            self.hooks = self.pack
            try:
                push_saved_tensors_hooks(self.hooks, unpack)
            except RuntimeError:  # torch may refuse it
                self.hooks = None
                raise
        self.kernels = _Kernels(self)
        self.kernels.__enter__()

    def layer_ends(self, *, completed: bool = True) -> None:
        self._compare_writes()
        if self.hooks is not None:
            remove_saved_tensors_hooks(self.hooks)
            self.hooks = None
        self.pause()

    def _compare_writes(self) -> None:
        """Find the storages that were written to more often than was counted.

        [Note: writes that are not counted]
        A tensor's version tells that it was written to, and all that is held for backward is compared by it. Some
        writes do not count: those through ``.data``, and those of a kernel that saves a tensor first and fills it then,
        such as the noise of RReLU. Autograd, which holds the storage, sees what was written; a copy or a replay would
        not. So the kernels' writes are counted here, and compared with the versions when the layer ends.
        """
        for number, counter, version, writes in self.seen:
            if self.written.get(number, 0) - writes > version_of(counter) - version:
                self.altered.add(number)
        self.seen = []

    def _see(self, tensor: Tensor) -> None:
        with DisableTorchFunction():  # our own look at it is no operator
            self._note_version(tensor)

    def _note_version(self, tensor: Tensor) -> None:
        if type(tensor) in PLAIN and not tensor.is_inference() and has_storage(tensor):
            number = self.origin(tensor).number
            self.seen.append((number, count_of_writes(tensor), version_of(tensor), self.written.get(number, 0)))

    def pause(self) -> None:
        """Watch nothing for a while."""
        if hooks_on_top(self.hooks):  # others may have put theirs on top: then ours rest anyway
            pop_saved_tensors_hooks()
            self.hooks = None  # after that: an interrupt between the two must not leave hooks that nobody knows of
        if self.kernels is not None:
            remove_dispatch_mode(self.kernels)
            self.kernels = None

    def call_begins(self, name: str, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.open = _OpenCall(name, site)
        for tensor in tensors_of((args, kwargs)):
            self.open.read(self.origin(tensor), tensor)
            self.open.repeatable &= has_storage(tensor)  # what vmap gives a call is nothing outside of it

    def call_ends(self, output: Any) -> None:
        if self.open is not None:  # it may have been interrupted before it was noted
            self.calls.append(self.open)
            self.open = None
            for tensor in tensors_of(output):
                self._quietly(self._see, tensor)

    def collective_begins(self, name: str) -> None:
        self.collectives.append(name)

    # Whose value a storage holds.

    def origin(self, tensor: Tensor) -> _Origin:
        known = self.origins.get(storage_key(tensor))
        if known is not None and not known.alive.expired():
            return known
        return self.record(tensor, "root", "")

    def record(self, tensor: Tensor, source: Source, owner: str, *, cast: bool = False) -> _Origin:
        key = storage_key(tensor)
        known = self.origins.get(key)
        number = known.number if known is not None and not known.alive.expired() else self.numbers
        self.numbers += number == self.numbers
        origin = _Origin(source, owner, number, weak_storage(tensor), cast)
        self.origins[key] = origin
        self.owners[number] = owner
        return origin

    def kernel(
        self, func: Any, given: list[Tensor], made: list[Tensor], changed: list[Tensor], *, unseen: bool
    ) -> None:
        """One kernel ran: it was given tensors, made new storages and changed old ones.

        With ``unseen`` the change is not counted in their versions: whoever made them would be recomputed without it.
        """
        name = func._schema.name
        if self.tell is not None and changed:
            self._quietly(self.tell, changed)
        for tensor in changed:
            number = self.origin(tensor).number
            self.written[number] = self.written.get(number, 0) + 1
            for call in [*self.calls, *([self.open] if self.open else [])]:
                call.repeatable &= number not in call.inputs and not (unseen and number in call.made)
            if self.open is not None and number not in self.open.made:
                self.open.repeatable = False  # a buffer of its own, such as running statistics
            self.packs = [pack._replace(rewritten=True) if pack.storage == number else pack for pack in self.packs]
        if self.open is not None:
            self.open.made.update(self.origin(tensor).number for tensor in made)
        if name in _FACTORIES:
            return
        origins = [self.origin(tensor) for tensor in given]
        source: Source = "operator"
        cast = False
        owner = self.open.name if self.open is not None else ""
        if name in _CASTS and len(given) == 1 and made and made[0].dtype != given[0].dtype:
            source, owner, cast = origins[0].source, origins[0].owner, True
        elif origins and all(origin.source == "static" for origin in origins):
            source, owner = "static", ""
        elif self.open is not None:
            self.open.writes = True
        for tensor in [*made, *changed]:
            self.record(tensor, source, owner, cast=cast)
        if self.open is not None and torch.Tag.nondeterministic_seeded in func.tags:
            self.open.random = True

    def opaque(self, made: list[Tensor]) -> None:
        """Something ran whose kernels are not seen, and gave these: it is the running call's, and not repeated."""
        if self.open is not None:
            self.open.writes, self.open.repeatable = True, False
        for tensor in made:
            self.record(tensor, "operator", self.open.name if self.open is not None else "")

    def pack(self, tensor: Tensor) -> Saved:
        """Autograd saves a tensor."""
        self.save(tensor)
        if isinstance(tensor, nn.Parameter):
            return Kept(tensor)  # it has no graph, and is to be known as what it is
        return self._quietly(self._seen_and_held, tensor)

    def _seen_and_held(self, tensor: Tensor) -> Saved:
        self._see(tensor)
        return self.hold(tensor)

    def _quietly(self, function: Callable[[Any], Result], given: Any) -> Result:
        """Call something of our own, whose kernels are not the layer's."""
        self.holding = True
        try:
            return function(given)
        finally:
            self.holding = False

    def save(self, tensor: Tensor) -> None:
        """Note that a tensor is saved."""
        origin, output = self.origin(tensor), is_own_output(tensor)
        self.packs.append(
            Pack(
                self.open.name if self.open is not None else "",
                origin.source,
                origin.owner,
                origin.number,
                storage_bytes(tensor),
                tuple(tensor.shape),
                tensor.dtype,
                (tensor.is_floating_point() or tensor.is_complex()) and has_storage(tensor),
                origin.cast,
                output,
            )
        )
        if self.saved is not None:
            self.saved(tensor, origin.source)


class _OpenCall:
    """A call as it is being learnt."""

    def __init__(self, name: str, site: Site) -> None:
        self.name, self.site = name, site
        self.reads: dict[str, None] = {}
        self.inputs: dict[int, int] = {}
        self.made: set[int] = set()
        """The storages that it made."""
        self.writes = self.random = self.communicates = False
        self.repeatable = True

    def read(self, origin: _Origin, tensor: Tensor) -> None:
        if origin.source == "operator" and origin.owner:
            self.reads[origin.owner] = None
        if origin.source != "static":
            self.inputs[origin.number] = storage_bytes(tensor)

    def close(self) -> Call:
        inputs = tuple(self.inputs.items())
        return Call(
            self.name,
            self.site,
            tuple(self.reads),
            inputs,
            self.writes,
            self.random,
            self.repeatable,
            self.communicates,
        )


class _Kernels(TorchDispatchMode):
    """Notes who wrote each storage last."""

    supports_higher_order_operators = True

    def __init__(self, profiler: Profiler) -> None:
        super().__init__()
        self.profiler = profiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.profiler.holding:
            return func(*args, **kwargs)
        if in_forward_mode():
            raise PolicyError(
                "a layer is differentiated in forward mode (torch.func.jvp, forward_ad) while it is profiled, where"
                " torch computes with other formulas; recompute the layer as a whole, or keep it"
            )
        if not hasattr(func, "_schema"):  # such as torch.cond: what it calls is its own
            result = func(*args, **kwargs)
            self.profiler.opaque(tensors_of(result))
            return result
        given = tensors_of((args, kwargs))
        known = {storage_key(tensor) for tensor in given}
        if self.profiler.open is not None and func.namespace in COLLECTIVE_NAMESPACES:
            self.profiler.open.communicates = True
        result = func(*args, **kwargs)
        made = [tensor for tensor in tensors_of(result) if storage_key(tensor) not in known]
        # Schemas of collectives in place do not say what they fill, and nor do versions.
        filled = func.namespace == "c10d"
        changed = given if filled else tensors_of(written_arguments(func, args, kwargs))
        unseen = filled or func._schema.name in WRITES_UNCOUNTED
        if made or changed:
            self.profiler.kernel(func, given, made, changed, unseen=unseen)
        return result


_FACTORIES = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
_CASTS = {"aten::_to_copy", "aten::to", "aten::type_as"}

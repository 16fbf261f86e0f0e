"""Profile one run of a layer: its operators, and the owner of every tensor that it saves for backward.

An operator is a call of a leaf module (all its internals are one unit) or a torch function called directly in a
module's forward. A tensor saved for backward belongs to the operator that last wrote its value, looking through views
and dtype casts. What is derived from parameters alone is static; what comes into the layer belongs to its boundary
or, if it is not the layer's own input, to the root.

[Note: how owners are found]
Three observers work together. Wrappers of the modules' forwards and a TorchFunctionMode report which operator is
running. A TorchDispatchMode below them sees every kernel and notes, for each storage, which operator wrote it last: a
new storage by the kernel that made it, an old one by the kernel whose schema says that it writes there. A view shares
its storage and needs no entry. A cast makes a new storage, but the value is its input's: the entry is copied. Factories
such as ``empty`` make a storage without a value and own nothing. Saved-tensor hooks then look the storage up. Storages
are known by address, and addresses are reused: an entry holds a weak reference and expires with its storage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from lowtide._torch_private.backward import in_forward_mode
from lowtide._torch_private.collectives import COLLECTIVE_NAMESPACES
from lowtide._torch_private.modes import DisableTorchFunction, TorchDispatchMode, remove_dispatch_mode
from lowtide._torch_private.nodes import is_own_output
from lowtide._torch_private.operators import is_operator, schema_of
from lowtide._torch_private.saved_tensor_hooks import (
    hooks_on_top,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    remove_saved_tensors_hooks,
    saved_by_selective_checkpoint,
)
from lowtide._torch_private.storages import has_storage, storage_bytes, storage_key
from lowtide._torch_private.subclasses import PLAIN
from lowtide._torch_private.versions import WRITES_UNCOUNTED, count_of_writes, version_of, written_arguments
from lowtide.errors import PolicyError
from lowtide.operators.calls import Site, tensors_of
from lowtide.operators.observation import Observation, Pack, Source
from lowtide.operators.origins import OpenCall, Origins
from lowtide.operators.saved import Kept, PackHook, Saved, foreign_pack_hook, kept_apart, unpack

__all__ = ["OnSave", "OnWrite", "Profiler"]

Result = TypeVar("Result")


OnSave: TypeAlias = Callable[[Tensor, Source], None]
"""Called with every tensor that autograd saves while a layer runs, and with its source."""

OnWrite: TypeAlias = Callable[[list[Tensor]], None]
"""Called with the tensors that a kernel has written into."""


class Profiler:
    """Profiles a layer while it runs, as a :class:`CallListener`: whose value each storage holds, and what is saved."""

    def __init__(
        self,
        layer: nn.Module,
        saved: OnSave | None = None,
        hold: PackHook = kept_apart,
        written: OnWrite | None = None,
    ) -> None:
        self.saved, self.hold, self.on_write = saved, hold, written
        self.in_own_code = False
        """Whether our own code runs, such as the pack hook: its kernels are not the layer's."""
        self.origins = Origins()
        self.calls: list[OpenCall] = []
        self.packs: list[Pack] = []
        self.collectives: list[str] = []
        self.open: OpenCall | None = None
        """The operator that is running."""
        self.kernels: _Kernels | None = None
        self.hooks: PackHook | None = None
        """The pack hook that is on torch's stack."""
        self.has_foreign_hooks = False
        """Whether other code's hooks are on, so that the layer is not profiled. See [Note: other code's hooks]."""
        self.seen: list[tuple[int, Tensor, int, int]] = []
        """Of each tensor that a call returned or autograd saved: the number of its storage, a tensor that shares its
        version counter, its version, and how often the storage had been written to. See [Note: uncounted writes]."""
        self.written: dict[int, int] = {}
        """How often each storage was written to."""
        self.altered: set[int] = set()
        """The storages with uncounted writes."""
        for tensor in [*layer.parameters(), *layer.buffers()]:
            self.origins.record(tensor, "static", "")

    def result(self) -> Observation:
        """What the last run showed."""
        for call in self.calls:
            call.repeatable &= not call.made & self.altered
        calls = tuple(call.close() for call in self.calls)
        packs = tuple(pack._replace(altered=pack.storage in self.altered) for pack in self.packs)
        return Observation(calls, packs, dict(self.origins.owners), tuple(self.collectives))

    # Which operator is running.

    def layer_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.calls, self.packs, self.collectives = [], [], []  # of a layer that runs twice the last run is kept
        self.seen, self.written, self.altered = [], {}, set()
        given = tensors_of((args, kwargs))
        for tensor in given:
            self.origins.of(tensor)
        for tensor in given[:1]:
            self.origins.record(tensor, "boundary", "")
        self.has_foreign_hooks = foreign_pack_hook() is not None
        self.resume()

    def resume(self) -> None:
        """Observe kernels and saved tensors, from the beginning of the layer or again after a pause."""
        if self.has_foreign_hooks:
            return
        if self.hooks is None:
            self.hooks = self.pack
            try:
                push_saved_tensors_hooks(self.hooks, unpack)
            except RuntimeError:  # hooks may not be allowed here
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
        """Find the storages that were written to more often than their versions count.

        [Note: uncounted writes]
        A tensor's version shows that it was written to, and everything that is held for backward is checked by it. Some
        writes are not counted: those through ``.data``, and those of a kernel that fills a tensor after it was saved,
        such as the noise of RReLU. Autograd, which holds the storage, sees what was written; a copy or a replay would
        not. So the kernels' writes are counted here, and compared with the versions when the layer ends.
        """
        for number, counter, version, writes in self.seen:
            if self.written.get(number, 0) - writes > version_of(counter) - version:
                self.altered.add(number)
        self.seen = []

    def _note_version(self, tensor: Tensor) -> None:
        with DisableTorchFunction():  # these calls are not the layer's
            if type(tensor) in PLAIN and not tensor.is_inference() and has_storage(tensor):
                number = self.origins.of(tensor).number
                self.seen.append((number, count_of_writes(tensor), version_of(tensor), self.written.get(number, 0)))

    def pause(self) -> None:
        """Observe nothing until :meth:`resume`."""
        if hooks_on_top(self.hooks):  # under other code's hooks ours are not called anyway
            pop_saved_tensors_hooks()
            self.hooks = None  # only now: an interrupt before this must not forget hooks that are on
        if self.kernels is not None:
            remove_dispatch_mode(self.kernels)
            self.kernels = None

    def call_begins(self, name: str, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.open = OpenCall(name, site)
        for tensor in tensors_of((args, kwargs)):
            self.open.read(self.origins.of(tensor), tensor)
            self.open.repeatable &= has_storage(tensor)  # vmap's tensors do not outlive it

    def call_ends(self, output: Any) -> None:
        if self.open is not None:  # None if it was interrupted before it was noted
            returned, call = tensors_of(output), self.open
            self.calls.append(call)
            self.open = None
            if call.communicates:
                with DisableTorchFunction():  # these calls are not the layer's
                    call.returns([self.origins.of(tensor).number for tensor in returned])
            for tensor in returned:
                self._quietly(self._note_version, tensor)

    def collective_begins(self, name: str) -> None:
        self.collectives.append(name)

    # Whose value a storage holds.

    def kernel(
        self, func: Any, given: list[Tensor], made: list[Tensor], changed: list[Tensor], *, unseen: bool
    ) -> None:
        """One kernel ran: it was given tensors, made new storages and changed old ones.

        ``unseen`` changes are not counted in versions: a replay of the call that made the storage would lack them.
        """
        name = schema_of(func).name
        if self.on_write is not None and changed:
            self._quietly(self.on_write, changed)
        for tensor in changed:
            number = self.origins.of(tensor).number
            self.written[number] = self.written.get(number, 0) + 1
            for call in [*self.calls, *([self.open] if self.open else [])]:
                call.repeatable &= number not in call.inputs and not (unseen and number in call.made)
            if self.open is not None and number not in self.open.made:
                self.open.repeatable = False  # a buffer of its own, such as running statistics
            self.packs = [pack._replace(rewritten=True) if pack.storage == number else pack for pack in self.packs]
        if self.open is not None:
            numbers = [self.origins.of(tensor).number for tensor in made]
            self.open.made.update(numbers)
            if func.namespace in COLLECTIVE_NAMESPACES:
                self.open.received.update(numbers)
        if name in _FACTORIES:
            return
        origins = [self.origins.of(tensor) for tensor in given]
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
            self.origins.record(tensor, source, owner, cast=cast)
        if self.open is not None and torch.Tag.nondeterministic_seeded in func.tags:
            self.open.random = True

    def opaque(self, made: list[Tensor]) -> None:
        """A function whose kernels are not seen made these: they are the running call's, which cannot be replayed."""
        if self.open is not None:
            self.open.writes, self.open.repeatable = True, False
        for tensor in made:
            self.origins.record(tensor, "operator", self.open.name if self.open is not None else "")

    def pack(self, tensor: Tensor) -> Saved:
        """The pack hook."""
        self.save(tensor)
        if isinstance(tensor, nn.Parameter):
            return Kept(tensor)  # it has no graph, and code may check for its class
        return self._quietly(self._hold, tensor)

    def _hold(self, tensor: Tensor) -> Saved:
        self._note_version(tensor)
        return self.hold(tensor)

    def _quietly(self, function: Callable[[Any], Result], given: Any) -> Result:
        """Call our own code, whose kernels are not the layer's."""
        self.in_own_code = True
        try:
            return function(given)
        finally:
            self.in_own_code = False

    def save(self, tensor: Tensor) -> None:
        """Note that autograd saves a tensor."""
        origin = self.origins.of(tensor)
        movable = (tensor.is_floating_point() or tensor.is_complex()) and has_storage(tensor)
        self.packs.append(
            Pack(
                self.open.name if self.open is not None else "",
                origin.source,
                origin.owner,
                origin.number,
                storage_bytes(tensor),
                tuple(tensor.shape),
                tensor.dtype,
                movable and not saved_by_selective_checkpoint(),
                origin.cast,
                is_own_output(tensor),
            )
        )
        if self.saved is not None:
            self.saved(tensor, origin.source)


class _Kernels(TorchDispatchMode):
    """Reports every kernel to the profiler."""

    supports_higher_order_operators = True

    def __init__(self, profiler: Profiler) -> None:
        super().__init__()
        self.profiler = profiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.profiler.in_own_code:
            return func(*args, **kwargs)
        if in_forward_mode():
            raise PolicyError(
                "a layer is differentiated in forward mode (torch.func.jvp, forward_ad) while it is profiled, where"
                " torch computes with other formulas; recompute the layer as a whole, or keep it"
            )
        if not is_operator(func):  # such as torch.cond, whose inner kernels are not seen
            result = func(*args, **kwargs)
            self.profiler.opaque(tensors_of(result))
            return result
        given = tensors_of((args, kwargs))
        known = {storage_key(tensor) for tensor in given}
        if self.profiler.open is not None and func.namespace in COLLECTIVE_NAMESPACES:
            self.profiler.open.communicates = True
        result = func(*args, **kwargs)
        made = [tensor for tensor in tensors_of(result) if storage_key(tensor) not in known]
        # Neither the schemas nor the versions of in-place collectives show what they fill.
        filled = func.namespace == "c10d"
        changed = given if filled else tensors_of(written_arguments(func, args, kwargs))
        unseen = filled or schema_of(func).name in WRITES_UNCOUNTED
        if made or changed:
            self.profiler.kernel(func, given, made, changed, unseen=unseen)
        return result


_FACTORIES = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
_CASTS = {"aten::_to_copy", "aten::to", "aten::type_as"}

"""Catch an operator that runs out of memory, make room, and retry it.

[Note: retrying an operator]
A dispatch mode sees every kernel below autograd, in forward and in backward, on autograd's threads too. When a kernel
runs out of memory nothing that it made is left, and it can be retried, if

- it drew no random numbers: the generators are noted before a random operator, and before one that is not torch's own;
- it wrote nothing: an operator that only makes new tensors, or overwrites its target whatever was in it, is simply
  retried. One that reads and writes its target may have written a part of it. In a single process the whole step is
  then retried immediately. With other ranks the operator is retried nevertheless, so that this rank issues the same
  collectives as they do, the step counts as spoilt, and all ranks retry it together before the optimizer uses its
  results;
- it is not a collective: other ranks may have taken part already. What a collective fills is allocated before, by its
  caller. The functional ones allocate their results themselves, before anything is sent: these are retried.

FSDP makes room for gathered parameters by resizing storages, which is not a kernel: resizing is intercepted separately.

A tensor subclass is taken apart first, and its plain tensors arrive here. Inside the handler the mode is off.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lowtide._torch_private.collectives import COLLECTIVE_NAMESPACES
from lowtide._torch_private.compiled import NothingCompiled
from lowtide._torch_private.modes import (
    TorchDispatchMode,
    dispatch_modes_on,
    insert_dispatch_mode,
    remove_dispatch_mode,
)
from lowtide._torch_private.operators import schema_of
from lowtide._torch_private.storages import resize_watchers, storage_address
from lowtide._torch_private.subclasses import PLAIN
from lowtide._torch_private.versions import WRITES_UNCOUNTED, written_arguments
from lowtide.adaptive.paging import touched_by
from lowtide.operators.calls import tensors_of
from lowtide.operators.formulas import Formulas, has_two_formulas
from lowtide.out_of_memory import is_out_of_memory, missing_bytes
from lowtide.runtime.randomness import RandomState, default_generators
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.adaptive.rescue import Rescue

__all__ = ["RetryMode"]


class _Traits(NamedTuple):
    """What has to be known of an operator before it can be retried."""

    random: bool
    """Whether it may draw random numbers."""
    collective: bool
    """Whether other ranks may have taken part when it fails."""
    writes: bool
    """Whether it writes into an argument."""
    overwrites: bool
    """Whether it does not read what it writes into."""
    per_tensor: bool
    """Whether it does the same to each tensor of its lists, so that it can be split."""
    two_formulas: bool = False
    """Whether its backward uses another formula under a mode."""
    unscales: bool = False
    """Whether a GradScaler unscales gradients by it."""
    simple: bool = False
    """Whether it only makes new tensors, out of nothing but its arguments."""


class RetryMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Retries operators that ran out of memory. See [Note: retrying an operator]."""

    def __init__(self, rescue: Rescue, multiple: float) -> None:
        """``multiple``: how many times the missing bytes are freed before a retry."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.rescue, self.multiple = rescue, multiple
        self.traits: dict[int, _Traits] = {}
        """By the operator's id: operators live forever, and hashing one takes longer."""
        self.wrote = False
        """Whether an optimizer's step has begun to write."""
        self.formulas = Formulas(self)
        self._eager = NothingCompiled()
        """Dynamo compiles nothing under a mode, but would still be there, and look at every function."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # asking takes as long as the rest of the handler, and nothing is compiled while the mode is on

    def on(self) -> None:
        """Intercept operators, at the bottom of the mode stack, and the resizing of storages."""
        if not any(one is self for one in dispatch_modes_on()):
            resize_watchers.add(self._resize)
            self._eager.on()
            insert_dispatch_mode(self)

    def off(self) -> None:
        """Intercept nothing; no-op if the mode is off."""
        remove_dispatch_mode(self)
        self._eager.off()
        resize_watchers.remove(self._resize)
        self.formulas.settle()

    def _resize(self, resize: Callable[[Any, int], Any], storage: Any, size: int) -> Any:
        try:
            return resize(storage, size)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            failure = error.with_traceback(None)
        traits = _Traits(random=False, collective=False, writes=False, overwrites=False, per_tensor=False)
        call = _Call(resize, (storage, size), {}, traits, {storage_address(storage)})
        self._retry(call, None, failure)
        return call.result

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and not PLAIN.issuperset(types):
            if any(hasattr(kind, "__tensor_flatten__") for kind in types):
                return NotImplemented
            return func(*args, **(kwargs or {}))  # fake tensors, by which DTensor propagates shapes
        if self.formulas.results:
            self.formulas.settle()
        traits = self.traits.get(id(func)) or self.traits.setdefault(id(func), _traits(func))
        pager = self.rescue.pager
        if traits.simple and not pager.paged_out and pager.stepping is None:
            try:  # the common case, which has to be fast
                return func(*args, **(kwargs or {}))
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                failure: RuntimeError | None = error.with_traceback(None)
            call, generators = _Call(func, args, kwargs or {}, traits), None
        else:
            call = _Call(func, args, kwargs or {}, traits)
            generators = call.random_state() if traits.random else None
            if generators is not None:
                self.rescue.drawn_from(generators)
            if traits.unscales:
                self.rescue.unscaled()
            failure = self._run(call)
        if failure is not None:
            self._retry(call, generators, failure)
        if pager.stepping is not None:
            self.wrote |= traits.writes
            pager.note(call.result)
        if traits.two_formulas:
            self.formulas.note(call.result)
        return call.result

    def _run(self, call: _Call) -> RuntimeError | None:
        """Run an operator once; the OOM error that it raised, or None."""
        pager, begun = self.rescue.pager, False
        try:
            if pager.paged_out:
                pager.page_in(call.touched(), self.rescue.make_room)
            begun = True
            call.result = call.func(*call.args, **call.kwargs)
        except RuntimeError as error:
            if not is_out_of_memory(error) or (begun and call.traits.collective):
                raise
            failure = error.with_traceback(None)  # a traceback holds the operator's arguments
        else:
            return None
        if begun and call.traits.writes and _reads_its_target(call):
            self.wrote |= pager.stepping is not None
            self.rescue.spoil(str(call.func))
        return failure

    def _retry(self, call: _Call, generators: RandomState | None, failure: RuntimeError | None) -> None:
        """Make room and run an operator again, until it succeeds. Raises when no more room can be made."""
        rescue, touched = self.rescue, call.touched()
        freed, times, collected = 0, 1.0, False
        while failure is not None:
            missing = missing_bytes(failure)
            rescue.counts.lack(missing)
            room = rescue.make_room(missing * self.multiple * times, touched)
            freed += room
            times *= 2  # more may be missing than the operator asked for
            if not room:
                if call.parts > 1:
                    self._run_split(call)
                    return
                if collected:
                    rescue.give_up(str(call.func), missing)
                    raise failure
                gc.collect()
                collected = True
            if generators is not None:
                generators.restore()
            failure = self._run(call)
        rescue.counts.retried_operators += 1
        rescue.counts.note(f"{call.func} lacked {format_bytes(missing)}: {format_bytes(freed)} offloaded")

    def _run_split(self, call: _Call) -> None:
        """Run an operator on lists one tensor at a time, so that the lists' other tensors can be paged out."""
        results: list[Any] = []
        for part in call.split():
            failure = self._run(part)
            if failure is not None:
                self._retry(part, None, failure)
            if part.result is not None:
                results += part.result
                self.rescue.pager.note(part.result)
        call.result = results or None


@dataclass(slots=True)
class _Call:
    """One call of an operator."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    traits: _Traits
    storages: set[int] | None = None
    result: Any = None

    def touched(self) -> set[int]:
        """The keys of the storages that it reads or writes."""
        if self.storages is None:
            self.storages = touched_by((self.args, self.kwargs))
        return self.storages

    def random_state(self) -> RandomState:
        """The states of the generators that it may draw from."""
        given = [*self.args, *self.kwargs.values()]
        named = [one for one in given if isinstance(one, torch.Generator)]
        devices = [one for one in given if type(one) is torch.device]
        return RandomState([*default_generators([*tensors_of(given), *devices]), *named])

    @property
    def parts(self) -> int:
        """How many calls it can be split into; 1 if it is not an operator on lists."""
        return len(self.args[0]) if self.traits.per_tensor and isinstance(self.args[0], list | tuple) else 1

    def split(self) -> list[_Call]:
        """The calls with one tensor of each list."""
        count = self.parts

        def part(value: Any, index: int) -> Any:
            return value[index : index + 1] if isinstance(value, list | tuple) and len(value) == count else value

        return [
            _Call(
                self.func,
                tuple(part(value, index) for value in self.args),
                {name: part(value, index) for name, value in self.kwargs.items()},
                self.traits,
            )
            for index in range(count)
        ]


def _traits(func: Any) -> _Traits:
    space, name = schema_of(func).name.split("::")
    written = [one for one in schema_of(func).arguments if one.alias_info is not None and one.alias_info.is_write]
    traits = _Traits(
        random=torch.Tag.nondeterministic_seeded in func.tags or space not in _TORCHS_OWN,
        collective=space in COLLECTIVE_NAMESPACES and (space != "_c10d_functional" or bool(written)),
        writes=bool(written) or schema_of(func).name in WRITES_UNCOUNTED,
        overwrites=name in _OVERWRITING or (bool(written) and all(one.is_out for one in written)),
        per_tensor=name.startswith("_foreach_"),
        two_formulas=has_two_formulas(func),
        unscales=name == "_amp_foreach_non_finite_check_and_unscale_",
    )
    return traits._replace(
        simple=not (traits.random or traits.collective or traits.writes or traits.two_formulas or traits.unscales)
    )


_TORCHS_OWN = {"aten", "prim", "prims", *COLLECTIVE_NAMESPACES}
_OVERWRITING = {
    "bernoulli_", "copy_", "exponential_", "fill_", "normal_", "random_", "resize_", "uniform_", "zero_",
    "_foreach_copy_", "_foreach_zero_",
}  # fmt: skip


def _reads_its_target(call: _Call) -> bool:
    """Whether a retry of an operator that has written a part of its target gives another result."""
    if not call.traits.overwrites:
        return True
    written = _flat(written_arguments(call.func, call.args, call.kwargs))
    targets = {id(one) for one in written}
    read = [one for one in _flat((*call.args, *call.kwargs.values())) if id(one) not in targets]
    return bool(touched_by(read) & touched_by(written))


def _flat(values: Iterable[Any]) -> list[Any]:
    """The values, and what is in lists among them."""
    return [one for value in values for one in (value if isinstance(value, list | tuple) else (value,))]

"""Catch an operator that runs out of memory, make room, and run it again.

[Note: repeating an operator]
A dispatch mode sees every kernel below autograd, in forward and in backward, on autograd's threads too. When a kernel
is out of memory nothing that it made is left, and it can be run again, if

- it drew no random numbers: the generators are noted before a random operator, and before one that is not torch's own;
- it wrote nothing: an operator that only makes new tensors, or writes all over its target whatever was there, is
  repeated as it is. One that changes its target may have changed a part of it. In a single process the step is begun
  anew at once. With others the operator is repeated all the same, so that this rank goes on in step with them, the step
  counts as spoilt, and all begin it anew together before the optimizer uses what came out of it;
- it is no collective: the others may have taken part already. What it fills is allocated before, by whoever calls it.
  The functional ones allocate what they give back themselves, before anything is sent: these are repeated.

FSDP makes room for gathered parameters by resizing storages, which is no kernel: that is watched apart.

A tensor subclass takes itself apart first; its plain tensors come here. Inside the handler the mode is off.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch

from lowtide._torch_private.collectives import COLLECTIVE_NAMESPACES
from lowtide._torch_private.modes import (
    TorchDispatchMode,
    dispatch_modes_on,
    insert_dispatch_mode,
    remove_dispatch_mode,
)
from lowtide._torch_private.storages import resize_watchers
from lowtide._torch_private.subclasses import PLAIN
from lowtide._torch_private.versions import WRITES_UNCOUNTED, written_arguments
from lowtide.adaptive.counts import Counts
from lowtide.adaptive.paging import Pager, touched_by
from lowtide.operators.calls import tensors_of
from lowtide.operators.formulas import Formulas, has_two_formulas
from lowtide.out_of_memory import is_out_of_memory, missing_bytes
from lowtide.runtime.randomness import RandomState, default_generators
from lowtide.units import format_bytes

__all__ = ["Defence", "Retry"]


class Defence(Protocol):
    """What the mode asks for when an operator has failed."""

    counts: Counts
    pager: Pager

    def make_room(self, wanted: float, touched: set[int]) -> int:
        """Free so many bytes, none of the storages ``touched``; how many are free now."""

    def spoil(self, operator: str) -> None:
        """An operator may have written a part of what it writes. Raises where the step can be repeated at once."""

    def give_up(self, operator: str, missing: int) -> None:
        """There is no more room to be made for an operator."""

    def drawn_from(self, generators: RandomState) -> None:
        """An operator is about to draw random numbers."""

    def unscaled(self) -> None:
        """A GradScaler is about to unscale gradients."""


class _Nature(NamedTuple):
    """What has to be known of an operator, in order to repeat it."""

    random: bool
    """Whether it may draw random numbers."""
    collective: bool
    """Whether other ranks may have taken part when it fails."""
    writes: bool
    """Whether it writes into an argument."""
    overwrites: bool
    """Whether it does not read what it writes into."""
    in_parts: bool
    """Whether it does the same to each tensor of its lists."""
    two_formulas: bool = False
    """Whether its backward is another one under a mode."""
    unscales: bool = False
    """Whether a GradScaler unscales gradients by it."""
    simple: bool = False
    """Whether it only makes new tensors, out of nothing but its arguments."""


class Retry(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Repeats operators that ran out of memory. See [Note: repeating an operator]."""

    def __init__(self, defence: Defence, multiple: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.defence, self.multiple = defence, multiple
        self.natures: dict[int, _Nature] = {}
        """By operator; operators are there for good, and hashing one takes longer than its address."""
        self.wrote = False
        """Whether an optimizer's step has begun to write."""
        self.formulas = Formulas(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it costs as much as all the rest here, and where the mode is on nothing is compiled

    def on(self) -> None:
        """Watch operators, at the bottom of the modes, and storages that are resized."""
        if not any(one is self for one in dispatch_modes_on()):
            resize_watchers.add(self._resize)
            insert_dispatch_mode(self)

    def off(self) -> None:
        """Watch no longer; nothing if we did not."""
        remove_dispatch_mode(self)
        resize_watchers.remove(self._resize)
        self.formulas.settle()

    def _resize(self, resize: Callable[[Any, int], Any], storage: Any, size: int) -> Any:
        try:
            return resize(storage, size)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            failure = error.with_traceback(None)
        nature = _Nature(random=False, collective=False, writes=False, overwrites=False, in_parts=False)
        call = _Call(resize, (storage, size), {}, nature, {storage._cdata})
        self._again(call, None, failure)
        return call.result

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and not _PLAIN.issuperset(types):
            if any(hasattr(kind, "__tensor_flatten__") for kind in types):
                return NotImplemented
            return func(*args, **(kwargs or {}))  # imagined tensors, by which DTensor finds out about shapes
        if self.formulas.results:
            self.formulas.settle()
        nature = self.natures.get(id(func)) or self._learn(func)
        pager = self.defence.pager
        if nature.simple and not pager.away and pager.stepping is None:
            try:  # the usual way, which has to be short
                return func(*args, **(kwargs or {}))
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                failure: RuntimeError | None = error.with_traceback(None)
            call, generators = _Call(func, args, kwargs or {}, nature), None
        else:
            call = _Call(func, args, kwargs or {}, nature)
            generators = call.random_state() if nature.random else None
            if generators is not None:
                self.defence.drawn_from(generators)
            if nature.unscales:
                self.defence.unscaled()
            failure = self._run(call)
        if failure is not None:
            self._again(call, generators, failure)
        if pager.stepping is not None:
            self.wrote |= nature.writes
            pager.note(call.result)
        if nature.two_formulas:
            self.formulas.note(call.result)
        return call.result

    def _learn(self, func: Any) -> _Nature:
        nature = self.natures[id(func)] = _nature(func)
        return nature

    def _run(self, call: _Call) -> RuntimeError | None:
        """Run an operator once; what it raised for want of memory, if it did."""
        pager, begun = self.defence.pager, False
        try:
            if pager.away:
                pager.page_in(call.touched(), self.defence.make_room)
            begun = True
            call.result = call.func(*call.args, **call.kwargs)
        except RuntimeError as error:
            if not is_out_of_memory(error) or (begun and call.nature.collective):
                raise
            failure = error.with_traceback(None)  # it holds what the operator was given
        else:
            return None
        if begun and call.nature.writes and _reads_its_target(call):
            self.wrote |= pager.stepping is not None
            self.defence.spoil(str(call.func))
        return failure

    def _again(self, call: _Call, generators: RandomState | None, failure: RuntimeError | None) -> None:
        """Make room and run an operator again, until it succeeds or there is no more room to be made."""
        defence, touched = self.defence, call.touched()
        freed, times, collected = 0, 1.0, False
        while failure is not None:
            missing = missing_bytes(failure)
            defence.counts.lack(missing)
            room = defence.make_room(missing * self.multiple * times, touched)
            freed += room
            times *= 2  # more may be missing than the operator asked for
            if not room:
                if call.parts > 1:
                    self._in_parts(call)
                    return
                if collected:
                    defence.give_up(str(call.func), missing)
                    raise failure
                gc.collect()
                collected = True
            if generators is not None:
                generators.restore()
            failure = self._run(call)
        defence.counts.retried += 1
        defence.counts.note(f"{call.func} lacked {format_bytes(missing)}: {format_bytes(freed)} left")

    def _in_parts(self, call: _Call) -> None:
        """Run an operator on lists for one tensor after another; what others of the lists need may leave meanwhile."""
        results: list[Any] = []
        for part in call.split():
            failure = self._run(part)
            if failure is not None:
                self._again(part, None, failure)
            if part.result is not None:
                results += part.result
                self.defence.pager.note(part.result)
        call.result = results or None


class _Call:
    """One call of an operator."""

    __slots__ = ("args", "func", "kwargs", "nature", "result", "storages")

    def __init__(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        nature: _Nature,
        storages: set[int] | None = None,
    ) -> None:
        self.func, self.args, self.kwargs, self.nature = func, args, kwargs, nature
        self.storages = storages
        self.result: Any = None

    def touched(self) -> set[int]:
        """The storages that it reads or writes."""
        if self.storages is None:
            self.storages = touched_by((self.args, self.kwargs))
        return self.storages

    def random_state(self) -> RandomState:
        """The generators that it may draw from, before it does."""
        given = [*self.args, *self.kwargs.values()]
        named = [one for one in given if isinstance(one, torch.Generator)]
        devices = [one for one in given if type(one) is torch.device]
        return RandomState([*default_generators([*tensors_of(given), *devices]), *named])

    @property
    def parts(self) -> int:
        """How many calls with a tensor of each list give the same; 1 if it is not an operator on lists."""
        return len(self.args[0]) if self.nature.in_parts and isinstance(self.args[0], list | tuple) else 1

    def split(self) -> list[_Call]:
        """These calls."""
        count = self.parts

        def part(value: Any, index: int) -> Any:
            return value[index : index + 1] if isinstance(value, list | tuple) and len(value) == count else value

        return [
            _Call(
                self.func,
                tuple(part(value, index) for value in self.args),
                {name: part(value, index) for name, value in self.kwargs.items()},
                self.nature,
            )
            for index in range(count)
        ]


_PLAIN = frozenset(PLAIN)


def _nature(func: Any) -> _Nature:
    space, name = func._schema.name.split("::")
    written = [one for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    nature = _Nature(
        random=torch.Tag.nondeterministic_seeded in func.tags or space not in _TORCHS_OWN,
        collective=space in COLLECTIVE_NAMESPACES and (space != "_c10d_functional" or bool(written)),
        writes=bool(written) or func._schema.name in WRITES_UNCOUNTED,
        overwrites=name in _OVERWRITING or (bool(written) and all(one.is_out for one in written)),
        in_parts=name.startswith("_foreach_"),
        two_formulas=has_two_formulas(func),
        unscales=name == "_amp_foreach_non_finite_check_and_unscale_",
    )
    return nature._replace(
        simple=not (nature.random or nature.collective or nature.writes or nature.two_formulas or nature.unscales)
    )


_TORCHS_OWN = {"aten", "prim", "prims", *COLLECTIVE_NAMESPACES}
_OVERWRITING = {
    "bernoulli_", "copy_", "exponential_", "fill_", "normal_", "random_", "resize_", "uniform_", "zero_",
    "_foreach_copy_", "_foreach_zero_",
}  # fmt: skip


def _reads_its_target(call: _Call) -> bool:
    """Whether an operator that writes gives another result if it is repeated after it wrote a part."""
    if not call.nature.overwrites:
        return True
    written = _flat(written_arguments(call.func, call.args, call.kwargs))
    targets = {id(one) for one in written}
    read = [one for one in _flat((*call.args, *call.kwargs.values())) if id(one) not in targets]
    return bool(touched_by(read) & touched_by(written))


def _flat(values: Iterable[Any]) -> list[Any]:
    """The values, and what is in lists among them."""
    return [one for value in values for one in (value if isinstance(value, list | tuple) else (value,))]

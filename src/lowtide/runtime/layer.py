"""What stands around a layer, or a part of it, so that its decisions are carried out whenever it runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor, nn

from lowtide._torch_private.backward import current_backward
from lowtide._torch_private.compiled import under_compilation
from lowtide._torch_private.modes import DisableTorchFunction
from lowtide._torch_private.nodes import node_number
from lowtide._torch_private.saved_tensor_hooks import (
    hooks_on_top,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    remove_saved_tensors_hooks,
    top_saved_tensors_hooks,
)
from lowtide._torch_private.storages import storage_key
from lowtide.operators.calls import tensors_of
from lowtide.operators.kept import Kept
from lowtide.operators.wrappers import Function, Wrappers
from lowtide.policy import Swap
from lowtide.runtime.ambient import ambient
from lowtide.runtime.checked import LayerCheck
from lowtide.runtime.collectives import Collectives
from lowtide.runtime.graft import Graft, learn_graft, put_on
from lowtide.runtime.intercept import intercept
from lowtide.runtime.ledger import Ledger, Line
from lowtide.runtime.program import Action, LayerProgram, Part
from lowtide.runtime.rebuild import Repeated
from lowtide.runtime.refuse import is_left_alone, refuse_compilation
from lowtide.runtime.run import CapturingRun, Run
from lowtide.runtime.saved import Pack, Saved, unpack
from lowtide.runtime.schedule import Starts, start
from lowtide.runtime.swap import Departures, SwapManager, Swapped

__all__ = ["DecidedLayer", "Span", "keeping", "pass_by", "swap_input", "take_off", "timed_again"]


class Span:
    """The numbers of a layer's operators, and what happens at its ends."""

    def __init__(self, manager: SwapManager, offset: int, count: int, last: bool) -> None:
        self.schedule = manager.schedule
        self.offset, self.count, self.last = offset, count, last

    def enter(self) -> int:
        """The layer begins; the number of its first operator."""
        return self.schedule.enter(self.offset)

    def leave(self, first: int, output: Any) -> None:
        """The layer has run: what is due when backward comes here starts with the gradient of its output."""
        schedule, end = self.schedule, first + self.count
        if schedule.next > end and not (self.last and schedule.returning):
            schedule.now = end
            return
        due = schedule.reach(end)
        if self.last:
            due += schedule.finish()
        if due:
            for tensor in tensors_of(output):
                if tensor.requires_grad:
                    tensor.register_hook(_Gradient(due))
                    return


class _Gradient:
    """The one hook that starts copies back."""

    __slots__ = ("due",)

    def __init__(self, due: list[ReferenceType[Swapped]]) -> None:
        self.due = due

    def __call__(self, gradient: Tensor) -> None:
        start(self.due)


def pass_by(forward: Function, span: Span, index: int) -> Function:
    """A layer that keeps everything, and in which something of another layer may be due."""

    def passed(*args: Any, **kwargs: Any) -> Any:
        refuse_compilation(index)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        first = span.enter()
        output = forward(*args, **kwargs)
        span.leave(first, output)
        return output

    return passed


def timed_again(forward: Function, ledger: Ledger, line: Line) -> Function:
    """A layer's forward as torch's own checkpoint repeats it in backward; what that takes is timed."""

    def timed(*args: Any, **kwargs: Any) -> Any:
        if current_backward() == -1:
            return forward(*args, **kwargs)
        given = args[0] if args else None
        device = given.device if type(given) is Tensor else _device_of((args, kwargs))
        begin = ledger.begin(device)
        line.recomputes += 1
        try:
            return forward(*args, **kwargs)
        finally:  # the checkpoint stops it early by an exception
            ledger.end(line, device, begin)

    return timed


def _device_of(given: Any) -> torch.device:
    return next((tensor.device for tensor in tensors_of(given)), torch.device("cpu"))


def swap_input(forward: Function, span: Span, swap: Swap, line: Line, manager: SwapManager) -> Function:
    """A layer that is recomputed as a whole and whose input, all that it holds, is swapped.

    The input is wanted when backward reaches the layer's last operator.
    """

    aside = pass_by(forward, span, line.layer)

    def swapped(*args: Any, **kwargs: Any) -> Any:
        refuse_compilation(line.layer)
        given = tensors_of((args, kwargs))
        if not torch.is_grad_enabled() or not given:
            return forward(*args, **kwargs)
        if is_left_alone():
            return aside(*args, **kwargs)
        first, key = span.enter(), storage_key(given[0])
        departures = Departures(manager)

        def pack(tensor: Tensor) -> Tensor | Saved:
            if storage_key(tensor) != key:
                return tensor
            saved = departures.out(tensor, swap, line, first + swap.prefetch)
            for one in departures.latest:
                manager.schedule.come_back(one.reference, first + span.count - 1 + swap.prefetch)
            return saved

        hooks = keeping(pack, manager)
        try:
            push_saved_tensors_hooks(hooks, unpack)
            output = forward(*args, **kwargs)
        finally:
            try:
                take_off(hooks)
            except BaseException:
                take_off(hooks)
                raise
        span.leave(first, output)
        return output

    return swapped


def keeping(pack: Pack, manager: SwapManager) -> Pack:
    """As ``pack``, but what would stay as it is goes to whoever asked for that."""
    keep = manager.keep
    if keep is None:
        return pack

    def kept(saved: Tensor | Saved) -> Tensor | Saved:
        if type(saved) is Kept:
            return keep(saved.kept)
        return keep(saved) if isinstance(saved, Tensor) else saved

    def pack_and_keep(tensor: Tensor) -> Tensor | Saved:
        with DisableTorchFunction():
            saved = pack(tensor)
            if type(saved) is Starts:
                saved.saved = kept(saved.saved)
                return saved
            return kept(saved)

    return pack_and_keep


def take_off(pack: Pack) -> None:
    """Take our hooks off, which are on top of torch's stack unless something was interrupted.

    It may itself be interrupted, even before its first line. So whoever calls this calls it again if it raises.
    """
    if hooks_on_top(pack):
        pop_saved_tensors_hooks()
    else:
        remove_saved_tensors_hooks(pack)


class DecidedLayer:
    """A layer some of whose operators are recomputed or swapped."""

    def __init__(
        self,
        layer: nn.Module,
        program: LayerProgram,
        manager: SwapManager,
        span: Span,
        check: LayerCheck | None = None,
        *,
        collectives: Collectives | None = None,
        narrow: bool = False,
    ) -> None:
        self.program, self.manager, self.span, self.check = program, manager, span, check
        self.collectives = collectives
        self.run: CapturingRun | None = None
        self.changed: Callable[[], None] | None = None
        """Called when the layer took another way than its kind."""
        self.graft: Graft | None = None
        """How the layer goes on without hooks, once that is known. See [Note: grafts]."""
        self.wrappers = Wrappers()
        self.layer, self.narrow = layer, narrow

    def attach(self) -> None:
        """Put the decisions to work."""
        layer, program, check = self.layer, self.program, self.check
        if program.captures:
            intercept(layer, program.sites, self._running, self.wrappers)
            self.wrappers.wrap(layer, self._capture)
        else:
            # The check follows the whole layer.
            part = program.part if check is None and self.narrow else Part("", 0, len(program.actions))
            self.wrappers.wrap(layer.get_submodule(part.module), partial(self._decide, part=part))
        if check is not None:
            check.tracker.attach()  # around ours, so that our hooks are the inner ones

    def _decide(self, forward: Function, part: Part) -> Function:
        program, manager, span, check = self.program, self.manager, self.span, self.check
        layer, schedule, offset, operators, last = program.layer, manager.schedule, span.offset, span.count, span.last
        start, stop, scheduled = part.start, part.stop, not part.module
        # One that is followed as a whole may have taken another way before, and do so again.
        by_node = all(action.by_node for action in program.actions if isinstance(action, Action))
        graftable = by_node and bool(part.module)

        aside = pass_by(forward, span, layer)

        # Every layer in every step goes through this, and pays for each function that it calls.
        def decided(*args: Any, **kwargs: Any) -> Any:
            nonlocal graftable
            if under_compilation():
                refuse_compilation(layer)
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            hooked = top_saved_tensors_hooks(False) is not None
            if hooked and is_left_alone():
                return aside(*args, **kwargs)
            surroundings = ambient(())  # no node that is read back is a matrix product
            begin = node_number()
            if self.graft is not None and manager.keep is None and not surroundings.modes and not hooked:
                output = forward(*args, **kwargs)
                made = node_number() - begin
                if not put_on(self.graft, output, made, manager.ledger, surroundings) and made:
                    self._took_another_way()
                return output
            first = schedule.base + offset
            if first < schedule.now:
                first = schedule.enter(offset)
            run = Run(program, manager, first, surroundings)
            run.number = start
            makers: dict[Repeated, Any] | None = {} if graftable else None
            run.makers = makers
            pack = run.pack if check is None else check.packing(run)
            if manager.keep is not None:
                pack = keeping(pack, manager)
            try:
                push_saved_tensors_hooks(pack, unpack)
                output = forward(*args, **kwargs)
            finally:
                try:
                    take_off(pack)
                except BaseException:
                    take_off(pack)
                    raise
                run.departures = run.repeated = run.makers = None
            if scheduled:
                end = first + operators
                if schedule.next > end and not (last and schedule.returning):
                    schedule.now = end
                else:
                    span.leave(first, output)
            # What is frozen saves nothing, and did not change.
            if (run.number != stop and run.number != start) or run.changed:
                self._took_another_way()
            elif makers:
                graftable, self.graft = False, learn_graft(output, begin, node_number(), makers)
            return output

        return decided

    def _running(self) -> CapturingRun | None:
        run = self.run
        return run if run is not None and run.thread == get_ident() else None

    def _capture(self, forward: Function) -> Function:
        aside = pass_by(forward, self.span, self.program.layer)

        def capturing(*args: Any, **kwargs: Any) -> Any:
            refuse_compilation(self.program.layer)
            if self.run is not None or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            if is_left_alone():
                return aside(*args, **kwargs)
            first = self.span.enter()
            run = CapturingRun(self.program, self.manager, first)
            pack = keeping(run.pack if self.check is None else self.check.packing(run), self.manager)
            self.run = run
            if self.collectives is not None:
                self.collectives.registry = run.registry
            try:
                push_saved_tensors_hooks(pack, unpack)
                output = forward(*args, **kwargs)
            finally:
                self.run = None  # before what may be interrupted: a layer that is taken to run is not decided
                if self.collectives is not None:
                    self.collectives.registry = None
                try:
                    take_off(pack)
                except BaseException:
                    take_off(pack)
                    raise
                run.end()
            self.span.leave(first, output)
            if 0 < run.number != len(self.program.actions) or run.changed:
                self._took_another_way()
            return output

        return capturing

    def remove(self) -> None:
        """Leave the layer as it was."""
        if self.check is not None:
            self.check.tracker.detach()
        self.wrappers.remove()

    def _took_another_way(self) -> None:
        if self.changed is not None:
            self.changed()

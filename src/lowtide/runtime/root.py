"""Carry out what was decided for the root: what a model computes outside its layers.

[Note: the root]
The root is followed as a layer is, except while a layer runs. Its hooks are taken off when a layer begins and put back
when it ends, so that in the layers everything is as it would be without them. Its operators are numbered with those of
the layers: some come before the first layer, the others after the last. What a layer saves of the root's, such as a
rotary table, is not the root's to move: it stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from lowtide._torch_private.saved_tensor_hooks import hooks_on_top, pop_saved_tensors_hooks, push_saved_tensors_hooks
from lowtide.operators.calls import Site
from lowtide.operators.kinds import LayerKind, layer_kind
from lowtide.operators.root import Root
from lowtide.operators.wrappers import Function, Wrappers, around, take_back
from lowtide.policy import ResolvedLayer
from lowtide.runtime.checked import checked
from lowtide.runtime.intercept import intercept
from lowtide.runtime.layer import Span, keeping, take_off
from lowtide.runtime.ledger import ROOT, where
from lowtide.runtime.program import LayerProgram, compile_layer
from lowtide.runtime.refuse import is_left_alone, refuse_compilation, refuse_compiled_function
from lowtide.runtime.run import CapturingRun
from lowtide.runtime.saved import Pack, Saved, unpack
from lowtide.runtime.swap import SwapManager

__all__ = ["RootFollower"]


class RootFollower:
    """What is attached to a model for what it computes outside its layers: a tracker that learns, or its decisions."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        manager: SwapManager,
        learnt: Callable[[], None],
        *,
        verify: bool,
    ) -> None:
        """``learnt`` is called when the root has become known, for the first time or anew."""
        self.model, self.layers, self.manager, self.learnt, self.verify = model, layers, manager, learnt, verify
        self.kind: LayerKind | None = None
        self.before = 0
        """How many of its operators come before the first layer."""
        self.program: LayerProgram | None = None
        self.decided: _DecidedRoot | None = None
        self.watched: Root | None = None
        self.watching = ExitStack()

    @property
    def idle(self) -> bool:
        """Whether the root is known, and keeps everything."""
        return self.program is not None and self.program.idle

    def watch(self) -> None:
        """Learn the root when the model next runs with gradients."""
        self.remove()
        self.watched = Root(self.model, self.layers)
        self.watched.tracker.listener = self
        self.watched.tracker.before_function = partial(refuse_compiled_function, ROOT)
        self.watching.enter_context(self.watched.watch())

    def install(self, resolved: ResolvedLayer, between: int) -> frozenset[int]:
        """Do what the Policy says, as far as that is anything; ``between`` is the number of operators in the layers.

        Given back is how many operators after the first layer's first something of the root is due in the layers.
        """
        assert self.kind is not None
        running = self.watched is not None or (self.decided is not None and self.decided.run is not None)
        if not running:  # layers may be learnt inside a run of the root, and then there is no changing it
            self.remove()
            positions = [place if place < self.before else place + between for place in self.kind.positions]
            decisions, boundary, ledger = resolved.decisions, resolved.boundary, self.manager.ledger
            self.program = compile_layer(
                ROOT, self.kind, decisions, boundary, ledger, positions=positions, noticed=True
            )
            if not self.program.idle:
                span = Span(self.manager, -self.before, between + len(self.kind.operators), last=True)
                self.decided = _DecidedRoot(self, self.program, span)
                self.decided.attach()
        assert self.program is not None
        return frozenset(number - self.before for number in self.program.due if 0 <= number - self.before < between)

    def remove(self) -> None:
        """Leave the model as it was."""
        self.watching.close()
        self.watched = None
        if self.decided is not None:
            self.decided.remove()
            self.decided = None

    # While the root is learnt, the tracker tells the follower and the follower the watcher.

    def layer_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        refuse_compilation(ROOT)
        assert self.watched is not None
        self.watched.watcher.layer_begins(args, kwargs)

    def call_begins(self, name: str, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self.watched is not None
        self.watched.watcher.call_begins(name, site, args, kwargs)

    def call_ends(self, output: Any) -> None:
        assert self.watched is not None
        self.watched.watcher.call_ends(output)

    def collective_begins(self, name: str) -> None:
        assert self.watched is not None
        self.watched.watcher.collective_begins(name)

    def layer_ends(self, *, completed: bool) -> None:
        if self.watched is None:  # it was told before
            return
        watcher, calls = self.watched.watcher, self.watched.before
        watcher.layer_ends()
        if not completed or not torch.is_grad_enabled():
            return
        self.remove()
        seen = watcher.result()
        first = seen.calls[:calls]  # all of them where no layer has run
        self.kind = layer_kind(self.model, seen)
        self.before = len({call.name for call in first if call.writes})
        self.learnt()


class _DecidedRoot:
    """A model whose operators outside the layers are recomputed or swapped. See [Note: the root]."""

    def __init__(self, follower: RootFollower, program: LayerProgram, span: Span) -> None:
        self.follower, self.program, self.span = follower, program, span
        self.run: CapturingRun | None = None
        self.pack: Pack | None = None
        """What is on torch's stack of hooks while the model runs."""
        self.paused: list[tuple[nn.Module, bool]] = []
        """The layers that run, one inside the other, and whether the hooks were taken off for it."""
        self.wrappers = Wrappers()
        self.handles: list[Any] = []

    def attach(self) -> None:
        """Put the decisions to work."""
        model = self.follower.model
        intercept(model, self.program.sites, self._running, self.wrappers)
        self.wrappers.wrap(model, self._follow)

    def remove(self) -> None:
        """Leave the model as it was."""
        self.wrappers.remove()
        self._take_off_hooks()

    def _take_off_hooks(self) -> None:
        take_back(handle.remove for handle in self.handles)
        self.handles.clear()

    def _running(self) -> CapturingRun | None:
        run = self.run
        return run if run is not None and not run.paused and run.thread == get_ident() else None

    def _follow(self, forward: Function) -> Function:
        manager = self.follower.manager

        def followed(*args: Any, **kwargs: Any) -> Any:
            refuse_compilation(ROOT)
            if self.run is not None or not torch.is_grad_enabled() or is_left_alone():
                return forward(*args, **kwargs)
            first = self.span.enter()
            run = CapturingRun(self.program, manager, first)
            pack = keeping(_checking(run) if self.follower.verify else run.pack, manager)
            try:
                for layer in self.follower.layers:
                    self.handles += around(layer, self._pause, self._resume)
                push_saved_tensors_hooks(pack, unpack)
                self.run, self.pack = run, pack
                output = forward(*args, **kwargs)
            finally:
                self.run = self.pack = None
                try:
                    take_off(pack)  # a layer that was interrupted may not have put them back
                except BaseException:
                    take_off(pack)
                    raise
                self._take_off_hooks()
                self.paused.clear()
                run.end()
            self.span.leave(first, output)
            if 0 < run.number != len(self.program.actions) or run.changed:
                self.follower.watch()
            return output

        return followed

    def _pause(self, layer: nn.Module, args: Any) -> None:
        refuse_compilation(ROOT)
        if self.run is None or self.run.thread != get_ident():
            return
        ours = hooks_on_top(self.pack)  # others may have put theirs on top, and then ours rest anyway
        self.paused.append((layer, ours))
        self.run.paused = True
        if ours:
            pop_saved_tensors_hooks()

    def _resume(self, layer: nn.Module, args: Any, output: Any) -> None:
        if self.run is None or self.run.thread != get_ident() or not self.paused or self.paused[-1][0] is not layer:
            return  # it was not paused for
        assert self.pack is not None
        _, ours = self.paused.pop()
        self.run.paused = bool(self.paused)
        if ours:
            push_saved_tensors_hooks(self.pack, unpack)


def _checking(run: CapturingRun) -> Pack:
    """As the run's own, with proof that what comes back is what left."""

    def pack(tensor: Tensor) -> Tensor | Saved:
        number = run.number
        return checked(run.pack(tensor), tensor, number, where(ROOT))

    return pack

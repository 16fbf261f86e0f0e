"""What is wrapped around a layer's forward so that its decisions are carried out whenever it runs."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from lowtide._torch_private.compiled import is_dynamo_compiling
from lowtide._torch_private.storages import storage_key
from lowtide.operators.calls import tensors_of
from lowtide.operators.saved import Saved, call_with_hooks, kept_apart
from lowtide.operators.wrappers import Function, Wrappers
from lowtide.policy import Swap
from lowtide.runtime.checked import LayerCheck
from lowtide.runtime.collectives import Collectives
from lowtide.runtime.intercept import intercept
from lowtide.runtime.ledger import Line
from lowtide.runtime.program import LayerProgram
from lowtide.runtime.refuse import is_left_alone, refuse_compilation
from lowtide.runtime.run import CapturingRun, Run
from lowtide.runtime.schedule import Span
from lowtide.runtime.swap import Offloads, SwapManager

__all__ = ["DecidedLayer", "pass_by", "swap_input"]


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


def swap_input(forward: Function, span: Span, swap: Swap, line: Line, manager: SwapManager) -> Function:
    """A layer that is recomputed as a whole and whose input, all that it holds, is swapped.

    The input is needed when backward reaches the layer's last operator.
    """
    undecided = pass_by(forward, span, line.layer)

    def swapped(*args: Any, **kwargs: Any) -> Any:
        refuse_compilation(line.layer)
        given = tensors_of((args, kwargs))
        if not torch.is_grad_enabled() or not given:
            return forward(*args, **kwargs)
        if is_left_alone():
            return undecided(*args, **kwargs)
        first, key = span.enter(), storage_key(given[0])
        offloads = Offloads(manager)

        def pack(tensor: Tensor) -> Saved:
            if storage_key(tensor) != key:
                return kept_apart(tensor)
            saved = offloads.pack(tensor, swap, line, first + swap.prefetch)
            offloads.reload_at(first + span.count - 1 + swap.prefetch)
            return saved or kept_apart(tensor)

        output = call_with_hooks(manager.kept_by_rescue(pack), forward, args, kwargs)
        span.leave(first, output)
        return output

    return swapped


class DecidedLayer:
    """A layer some of whose operators are recomputed or swapped."""

    def __init__(
        self,
        layer: nn.Module,
        program: LayerProgram,
        manager: SwapManager,
        span: Span,
        diverged: Callable[[], None],
        check: LayerCheck | None = None,
        collectives: Collectives | None = None,
        in_graphs: bool = False,
    ) -> None:
        """``diverged`` is called when a run's control flow was not that of the layer's profile.

        ``in_graphs`` says that the decisions are carried out otherwise where the layer is compiled.
        """
        self.layer, self.program, self.manager, self.span = layer, program, manager, span
        self.diverged, self.check, self.collectives, self.in_graphs = diverged, check, collectives, in_graphs
        self.run: CapturingRun | None = None
        """The run in progress, where calls are captured."""
        self.wrappers = Wrappers()

    def attach(self) -> None:
        """Start to carry the decisions out."""
        if self.program.captures:
            intercept(self.layer, self.program.sites, self._running, self.wrappers)
        self.wrappers.wrap(self.layer, self._decided)
        if self.check is not None:
            self.check.tracker.attach()  # around ours, so that our hooks are the inner ones

    def run_now(self, forward: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Attach this while the layer's forward is called already, and call what is left of it."""
        self.attach()
        return self.wrappers.around(self.layer, forward)(*args, **kwargs)

    def remove(self) -> None:
        """Restore the layer."""
        if self.check is not None:
            self.check.tracker.detach()
        self.wrappers.remove()

    def _running(self) -> CapturingRun | None:
        run = self.run
        return run if run is not None and run.thread == get_ident() else None

    def _decided(self, forward: Function) -> Function:
        program, manager, span = self.program, self.manager, self.span
        undecided = pass_by(forward, span, program.layer)

        def decided(*args: Any, **kwargs: Any) -> Any:
            if self.in_graphs and is_dynamo_compiling():
                return forward(*args, **kwargs)
            refuse_compilation(program.layer)
            if self.run is not None or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            if is_left_alone():
                return undecided(*args, **kwargs)
            first = span.enter()
            run = (CapturingRun if program.captures else Run)(program, manager, first)
            pack = manager.kept_by_rescue(run.pack if self.check is None else self.check.packing(run))
            try:
                if isinstance(run, CapturingRun):
                    self._capture(run)
                output = call_with_hooks(pack, forward, args, kwargs)
            finally:
                self._capture(None)
                run.end()
            span.leave(first, output)
            # A frozen layer saves nothing, and did not diverge.
            if 0 < run.number != len(program.actions) or run.changed:
                self.diverged()
            return output

        return decided

    def _capture(self, run: CapturingRun | None) -> None:
        self.run = run
        if self.collectives is not None:
            self.collectives.registry = None if run is None else run.registry

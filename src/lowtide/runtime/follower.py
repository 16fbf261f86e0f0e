"""Follow one layer of a model on which a Policy is at work: profile it, then carry its decisions out.

[Note: the states of a layer]
A layer is in one of these states; in each but ``KEPT`` and ``REMOVED`` one thing is attached to it, which is removed
when it goes to the next:

- ``KEPT``: nothing is attached. The layer keeps everything, or waits for another layer like it to be profiled.
- ``PROFILED``: a tracker watches its next run with gradients.
- ``DECIDED``: its operators are recomputed or swapped (:class:`~lowtide.runtime.layer.DecidedLayer`).
- ``SCHEDULED``: it keeps or recomputes everything, and tells the schedule that it runs: something of another layer is
  due in it, or its own input is swapped.
- ``REMOVED``: the Policy is gone, and the layer is restored.

A decided layer whose control flow diverges from its profile is profiled again, alone, and decided again. Four things
do not depend on the state and stay until the end: the whole-layer checkpoint, what gives a compiler the decisions, the
hooks around a compiled layer, and the capture of collectives that are re-issued. A layer that may be compiled has what
its state attaches only once it runs in eager mode: Dynamo would guard every wrapper.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias
from weakref import WeakMethod

import torch
from torch import nn

from lowtide._torch_private.compiled import between_graphs, compiled_call, is_compiled, uncompiled
from lowtide.errors import PolicyError
from lowtide.operators.calls import CallTracker, Site, tensors_of
from lowtide.operators.kinds import LayerKind, layer_kind
from lowtide.operators.observation import Observation
from lowtide.operators.profiler import Profiler
from lowtide.operators.wrappers import Function, Wrappers
from lowtide.policy import Catalogue, Communication, Operator, Policy, ResolvedLayer, Swap, resolve
from lowtide.runtime.checked import LayerCheck
from lowtide.runtime.collectives import Collectives
from lowtide.runtime.communication import decide_collectives
from lowtide.runtime.compiled import CompiledLayer, has_compiled
from lowtide.runtime.graph import GraphLayer
from lowtide.runtime.layer import DecidedLayer, pass_by, swap_input
from lowtide.runtime.ledger import WHOLE
from lowtide.runtime.program import BOUNDARY, LayerProgram, compile_layer
from lowtide.runtime.recompute import recompute_layer
from lowtide.runtime.refuse import refuse_compilation, refuse_compiled_function
from lowtide.runtime.schedule import Span
from lowtide.runtime.swap import SwapManager

__all__ = ["LayerFollower", "State", "Structure", "structure_of"]

Structure: TypeAlias = tuple[tuple[str, type[nn.Module]], ...]
"""The modules of a layer and their classes. Layers of one structure are expected to have the same operators; layers of
one class need not: some have experts where others have a dense block."""


def structure_of(layer: nn.Module) -> Structure:
    """The modules of a layer and their classes."""
    return tuple((name, type(module)) for name, module in layer.named_modules())


class State(Enum):
    """See [Note: the states of a layer]."""

    KEPT = "kept"
    PROFILED = "profiled"
    DECIDED = "decided"
    SCHEDULED = "scheduled"
    REMOVED = "removed"


_NEXT = {
    State.KEPT: {State.KEPT, State.PROFILED, State.DECIDED, State.SCHEDULED, State.REMOVED},
    State.PROFILED: {State.KEPT, State.PROFILED, State.REMOVED},
    State.DECIDED: {State.PROFILED, State.REMOVED},
    State.SCHEDULED: {State.REMOVED},
    State.REMOVED: {State.REMOVED},
}
"""Where a layer can go from each state."""


class Attached(Protocol):
    """What is attached to a layer in one of its states."""

    def attach(self) -> None:
        """Put it on."""

    def remove(self) -> None:
        """Restore the layer."""


class Shared(NamedTuple):
    """What all layers of a model have in common."""

    policy: Policy
    manager: SwapManager
    profiles: dict[Structure, LayerKind]
    """What is known of the layers, by their structure."""
    verify: bool
    profiled: Callable[[Structure, LayerKind], None]
    """Called when a structure has been profiled."""
    frozen: Callable[[LayerFollower], None]
    """Called when a layer that was to be profiled saved nothing, since nothing in it needs gradients."""
    is_apart: Callable[[LayerFollower], bool]
    """Whether a layer whose input has no gradient, as after frozen embeddings, is profiled for itself alone."""


class LayerFollower:
    """One layer of a model, and what is attached to it. See [Note: the states of a layer]."""

    def __init__(self, index: int, layer: nn.Module, shared: Shared) -> None:
        self.index, self.layer, self.shared = index, layer, shared
        self.structure = structure_of(layer)
        """When the Policy was applied: ``fully_shard`` gives modules another class."""
        self.settings = shared.policy.layers[index]
        self.compiled = has_compiled(layer)
        rules, swaps = bool(self.settings.rules), GraphLayer.swaps(self.settings)
        if self.compiled and (self.settings.collectives or (rules and not is_compiled(layer))):
            raise PolicyError(
                f"a part of layer {index} is compiled ({self.settings}): its operators can be decided one by one where"
                " the whole layer is compiled or nothing in it, and collectives where nothing is; recompute or swap the"
                " layer as a whole"
            )
        self.plain = uncompiled(layer)
        """The layer's own module, whose forward is what torch.compile traces."""
        self.graph: GraphLayer | None = None
        """Its decisions where it is compiled, or may be."""
        whole = self.settings.recomputed_as_a_whole and shared.policy.communication == Communication()
        by_operator = rules and not self.settings.recomputed_as_a_whole and not self.settings.collectives
        if whole or (by_operator and (self.compiled or not swaps)):
            self.graph = GraphLayer.of(self.plain, self.settings, shared.policy)
        self.graph_broke = False
        """Whether Dynamo breaks its graph inside the layer, which is recomputed as a whole."""
        self.pending: _Profiling | DecidedLayer | None = None
        """What waits for a run in eager mode: a layer that is compiled has nothing else attached to it."""
        self.swaps_compiled = self.compiled and swaps
        """Whether it is compiled, and something that it saves is swapped."""
        self.state = State.KEPT
        self.attached: Attached | None = None
        self.permanent = Wrappers()
        """The whole-layer checkpoint, what gives a compiler the decisions, the hooks around a compiled layer."""
        self.collectives: Collectives | None = None
        self.program: LayerProgram | None = None
        self.own_profile: LayerKind | None = None
        """Its profile, where it diverged from the one that it shares with others."""
        self.resolved: ResolvedLayer | None = None
        """What the Policy says, by operator; the Handle sets this and ``span`` when it knows the operators."""
        self.span: Span | None = None

    @property
    def profile(self) -> LayerKind | None:
        """What is known of the layer."""
        return self.own_profile or self.shared.profiles.get(self.structure)

    @property
    def catalogue(self) -> tuple[Operator, ...] | None:
        """Its operators, as a run or a trace has shown them, or none where it has nothing to decide."""
        if (profile := self.profile) is not None:
            return profile.catalogue
        if self.graph is not None:
            return self.graph.catalogue
        return None if self.settings.rules else ()

    @property
    def due(self) -> frozenset[int]:
        """At how many operators after the layer's first something of it is due."""
        if self.program is not None:
            return self.program.due
        if self.resolved is None or self.span is None or not isinstance(self.resolved.boundary, Swap):
            return frozenset()
        prefetch = self.resolved.boundary.prefetch
        return frozenset((prefetch, self.span.count - 1 + prefetch))

    # Transitions.

    def start(self) -> None:
        """Attach what does not depend on the layer's profile."""
        settings, manager = self.settings, self.shared.manager
        if settings.recomputed_as_a_whole:
            self.permanent.wrap(self.plain, self._unless_profiled)
            if self.graph is not None:
                self.graph.on_break.append(WeakMethod(self._when_graph_breaks))
        elif self.graph is not None:
            self.permanent.wrap(self.plain, self._compiled_or_eager)
        if self.swaps_compiled:
            last = self.index == len(self.shared.policy.layers) - 1
            swapped = CompiledLayer(self.layer, self.index, settings, self.graph, manager, last)
            self.permanent.wrap(self.layer, swapped.swap, compiled_call(self.layer))

    def watch(self) -> None:
        """Profile the layer when it next runs with gradients."""
        if self.state is not State.REMOVED:
            self._go(State.PROFILED, _Profiling(self.index, self.layer, self._profiled))

    def install(self, due: frozenset[int] = frozenset()) -> None:
        """Carry out what the Policy says, now that the layer's profile is known.

        ``due`` is what earlier layers have due in this one.
        """
        if self.state is not State.KEPT:  # decided before, or about to be profiled
            return
        resolved, span, manager = self.resolved, self.span, self.shared.manager
        assert resolved is not None
        assert span is not None
        boundary = resolved.boundary
        whole = self.settings.recomputed_as_a_whole
        if not whole and (not self.compiled or (self.graph is not None and self.plain is self.layer)):
            decided = self._decided(resolved, span, due) if self.profile is not None else None
            if self.compiled:
                self.pending = decided
            elif decided is not None:
                self._go(State.DECIDED, decided)
                return
        make: Callable[[Function], Function] | None = None
        if isinstance(boundary, Swap) and whole and not self.compiled:
            line = manager.ledger.line(self.index, BOUNDARY)
            make = partial(swap_input, span=span, swap=boundary, line=line, manager=manager)
        elif due and not self.swaps_compiled:
            make = partial(pass_by, span=span, index=self.index)
        if make is not None:
            self._go(State.SCHEDULED, _Wrapped(self.layer, make, compiled_call(self.layer)))

    def remove(self) -> None:
        """Restore the layer."""
        self._go(State.REMOVED)
        if self.collectives is not None:
            self.collectives.remove()
        self.permanent.remove()
        if self.graph is not None:
            self.graph.unsubscribe(self._when_graph_breaks)

    def _go(self, state: State, attached: Attached | None = None) -> None:
        """Remove what is attached, and attach what the next state has."""
        assert state in _NEXT[self.state], f"layer {self.index}: {self.state} to {state}"
        if self.attached is not None:
            self.attached.remove()
        self.state, self.attached, self.pending = state, attached, None
        waits = self.graph is not None and not self.settings.recomputed_as_a_whole
        if isinstance(attached, _Profiling) and waits:
            self.pending = attached
        elif attached is not None:
            attached.attach()

    def _profiled(self, seen: Observation, given_gradients: bool) -> None:
        """A run with gradients was profiled."""
        if self.state is State.REMOVED:
            return
        self._go(State.KEPT)
        if not seen.packs:
            self.shared.frozen(self)
            return
        self.shared.manager.ledger.profiled.add(self.index)
        kind = layer_kind(self.layer, seen)
        if self.structure not in self.shared.profiles:
            if not given_gradients and self.shared.is_apart(self):
                self.own_profile = kind
                return
            self.shared.profiled(self.structure, kind)
            return
        self.own_profile = kind  # its control flow diverged from that of its structure
        policy = Policy((self.settings,), origin=self.shared.policy.origin)
        self.resolved = resolve(policy, Catalogue((kind.catalogue,)), require_match=False).layers[0]
        self.install()

    # What is attached.

    def _compiled_or_eager(self, forward: Function) -> Function:
        """Give the compiler what is decided; attach what is pending when the layer runs in eager mode."""
        assert self.graph is not None

        def eager(*args: Any, **kwargs: Any) -> Any:
            if self.state is not State.DECIDED and torch.is_grad_enabled():
                refuse_compilation(self.index)
                if self.pending is not None:
                    pending, self.pending = self.pending, None
                    if isinstance(pending, DecidedLayer):
                        self.state, self.attached = State.DECIDED, pending
                    return pending.run_now(forward, args, kwargs)
            return forward(*args, **kwargs)

        return self.graph.traceable(forward, eager)

    def _unless_profiled(self, forward: Function) -> Function:
        """Recompute the whole layer, but not while its operators are profiled: a checkpoint would hide them."""
        ledger, line = self.shared.manager.ledger, self.shared.manager.ledger.line(self.index, WHOLE)

        def recomputed(forward: Function) -> Function:
            return recompute_layer(forward, self.layer, self.shared.policy, ledger, line)

        if self.graph_broke:
            return between_graphs(forward, recomputed)
        eager = recomputed(forward)

        def unless_profiled(*args: Any, **kwargs: Any) -> Any:
            return (forward if self.state is State.PROFILED else eager)(*args, **kwargs)

        return unless_profiled if self.graph is None else self.graph.traceable(forward, unless_profiled)

    def _when_graph_breaks(self) -> None:
        """Dynamo breaks its graph inside such a layer: torch's checkpoint recomputes it from now on."""
        assert self.graph is not None
        self.graph.unsubscribe(self._when_graph_breaks)  # the next Handle's layers break the same graph
        self.permanent.remove()
        self.graph, self.graph_broke = None, True
        self.start()
        line = self.shared.manager.ledger.line(self.index, WHOLE)
        line.note("torch.compile breaks its graph inside the layer, which is not compiled as one piece")

    def _decided(self, resolved: ResolvedLayer, span: Span, due: frozenset[int]) -> DecidedLayer | None:
        """The layer with its decisions; None if it keeps everything."""
        shared, kind = self.shared, self.profile
        assert kind is not None
        ledger = shared.manager.ledger
        decisions = decide_collectives(self.index, kind, resolved, shared.policy, ledger)
        self.program = program = compile_layer(self.index, kind, decisions, resolved.boundary, ledger, due)
        if program.idle:
            return None
        # From now on in every run, profiled and diverged ones included: see [Note: re-issued collectives].
        if self.collectives is None and any(program.reissued):
            self.collectives = Collectives(self.index, ledger)
            self.collectives.attach(self.layer)
        if self.collectives is not None:
            self.collectives.wanted = program.reissued
        check = LayerCheck(self.index, self.layer, kind) if shared.verify else None
        in_graphs = self.graph is not None
        return DecidedLayer(self.layer, program, shared.manager, span, self.watch, check, self.collectives, in_graphs)


class _Wrapped:
    """A layer's forward, wrapped."""

    def __init__(self, layer: nn.Module, make: Callable[[Function], Function], attribute: str) -> None:
        self.layer, self.make, self.attribute = layer, make, attribute
        self.wrappers = Wrappers()

    def attach(self) -> None:
        self.wrappers.wrap(self.layer, self.make, self.attribute)

    def remove(self) -> None:
        self.wrappers.remove()


class _Profiling:
    """A layer whose next run with gradients is profiled."""

    def __init__(self, index: int, layer: nn.Module, done: Callable[[Observation, bool], None]) -> None:
        self.index, self.layer, self.done = index, layer, done
        self.given_gradients = False
        """Whether the layer's input has gradients."""
        self.tracker = CallTracker(layer, self, partial(refuse_compiled_function, index))
        self.profiler: Profiler | None = None

    def attach(self) -> None:
        self.tracker.attach()

    def run_now(self, forward: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Attach the tracker while the layer's forward is called already, and call what is left of it."""
        self.attach()
        return self.tracker.tracked(self.layer, forward)(*args, **kwargs)

    def remove(self) -> None:
        self.tracker.detach()

    # The tracker's listener: a profiler of its own for each run, since parameters may be gathered only then.

    def layer_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        refuse_compilation(self.index)
        self.given_gradients = any(one.requires_grad for one in tensors_of((args, kwargs)))
        self.profiler = Profiler(self.layer)
        self.profiler.layer_begins(args, kwargs)

    def call_begins(self, name: str, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self.profiler is not None
        self.profiler.call_begins(name, site, args, kwargs)

    def call_ends(self, output: Any) -> None:
        assert self.profiler is not None
        self.profiler.call_ends(output)

    def collective_begins(self, name: str) -> None:
        assert self.profiler is not None
        self.profiler.collective_begins(name)

    def layer_ends(self, *, completed: bool) -> None:
        if self.profiler is None:  # it was refused to begin
            return
        self.profiler.layer_ends()
        seen, self.profiler = self.profiler.result(), None
        if completed and (seen.packs or torch.is_grad_enabled()):  # without gradients there is nothing to profile
            self.done(seen, self.given_gradients)

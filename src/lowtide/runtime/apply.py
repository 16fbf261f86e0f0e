"""Carry out a Policy on a live model."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from lowtide.errors import PolicyError
from lowtide.operators.calls import CallTracker
from lowtide.operators.kinds import LayerKind, layer_kind
from lowtide.operators.layers import Layers, find_layers
from lowtide.operators.observe import Watcher
from lowtide.policy import Catalogue, Keep, LayerPolicy, Policy, Recompute, Resolution, Swap, Unused, resolve
from lowtide.runtime.intercept import Wrappers
from lowtide.runtime.layer import DecidedLayer, Span, pass_by, swap_input
from lowtide.runtime.ledger import Ledger
from lowtide.runtime.limits import Limits
from lowtide.runtime.program import BOUNDARY, LayerProgram, compile_layer
from lowtide.runtime.swap import SwapManager

__all__ = ["Handle", "apply"]


def apply(model: nn.Module, policy: Policy, *, layers: str | None = None, limits: Limits | None = None) -> Handle:
    """Make ``model`` keep, recompute or swap each operator's tensors as ``policy`` says.

    The operators of a class of layers are learnt while its first layer runs for the first time; that layer keeps
    everything in that step. A pattern that matches nothing raises :class:`~lowtide.errors.UnmatchedError` then.

    ``handle = lowtide.apply(model, policy)``; ``handle.remove()`` leaves the model as it was.
    """
    found = find_layers(model, layers)
    if len(found.modules) != len(policy.layers):
        raise PolicyError(
            f"the policy decides {len(policy.layers)} layers and {found.path or 'the model'} has {len(found.modules)};"
            " make the policy for this model, or name its layers"
        )
    if policy.root != LayerPolicy():
        raise PolicyError(f"decisions for what is outside the layers are not carried out: {policy.root}; keep the root")
    return Handle(found, policy, limits or Limits())


class Handle:
    """A Policy at work on a model."""

    def __init__(self, layers: Layers, policy: Policy, limits: Limits) -> None:
        self.layers, self.policy = layers, policy
        self.kinds: dict[type[nn.Module], LayerKind] = {}
        self.resolution: Resolution | None = None
        self.ledger = Ledger()
        self.manager = SwapManager(limits, self.ledger)
        self.followers = [_Follower(self, index) for index in range(len(layers.modules))]
        self.learning: set[type[nn.Module]] = set()
        """The classes of layers that have to be known."""
        if any(settings.rules or settings.boundary != Keep() or _by_operator(settings) for settings in policy.layers):
            # Of a layer that is recomputed as a whole less is seen: it is asked only where its class has no other.
            for follower in sorted(self.followers, key=lambda follower: follower.whole):
                if type(follower.layer) not in self.learning:
                    self.learning.add(type(follower.layer))
                    follower.watch()

    @property
    def unused(self) -> tuple[Unused, ...]:
        """The settings that had no effect; known after the first step."""
        return self.resolution.unused if self.resolution is not None else ()

    @property
    def kept(self) -> tuple[tuple[int, str], ...]:
        """The (layer, operator) pairs that were to be recomputed and are kept, since their call cannot be repeated."""
        return tuple(
            (follower.index, name)
            for follower in self.followers
            if follower.program is not None
            for name in follower.program.refused
        )

    def remove(self) -> None:
        """Leave the model as it was."""
        for follower in self.followers:
            follower.remove()
        self.manager.close()

    def learnt(self, module: nn.Module, kind: LayerKind) -> None:
        """A class of layers is known: its layers do from now on what the Policy says."""
        self.kinds[type(module)] = kind
        complete = self.learning <= set(self.kinds)
        catalogues = {name: known.catalogue for name, known in self.kinds.items()}
        # A class that has not run yet counts as many operators as this one; there is nothing better to go by.
        catalogue = Catalogue(tuple(catalogues.get(type(layer), kind.catalogue) for layer in self.layers.modules))
        resolution = resolve(self.policy, catalogue, require_match=complete)
        if complete:
            self.resolution = resolution
        offset = 0
        spans = []
        for index, operators in enumerate(catalogue.layers):
            spans.append(Span(self.manager, offset, len(operators), index == len(catalogue.layers) - 1))
            offset += len(operators)
        for follower, span, resolved in zip(self.followers, spans, resolution.layers, strict=True):
            follower.span, follower.resolved = span, resolved
        due: frozenset[int] = frozenset()
        for follower, span in zip(self.followers, spans, strict=True):
            if type(follower.layer) in self.kinds or follower.whole:
                follower.install(due)
            due = frozenset(number - span.count for number in due | follower.due if number > span.count)


class _Follower:
    """What is attached to one layer: nothing, a checkpoint, a tracker that learns, or its decisions at work."""

    def __init__(self, handle: Handle, index: int) -> None:
        self.handle, self.index = handle, index
        self.layer = handle.layers.modules[index]
        self.settings = handle.policy.layers[index]
        self.whole = self.settings.default == Recompute() and not _by_operator(self.settings)
        self.wrappers = Wrappers()
        self.tracker: CallTracker | None = None
        self.watcher: Watcher | None = None
        self.decided: DecidedLayer | None = None
        self.program: LayerProgram | None = None
        self.span: Span | None = None
        self.resolved: Any = None
        self.kind: LayerKind | None = None
        self.noticed = False
        """Whether the layer, though it keeps everything or recomputes it, tells the schedule that it runs."""
        if self.whole:
            self.wrappers.wrap(self.layer, lambda forward: partial(checkpoint, forward, use_reentrant=False))

    @property
    def due(self) -> frozenset[int]:
        """How many operators after the layer's first something of it is due."""
        if self.program is not None:
            return self.program.due
        return frozenset({self.settings.boundary.prefetch} if isinstance(self.settings.boundary, Swap) else ())

    def watch(self) -> None:
        """Learn the layer when it next runs with gradients."""
        self._undo()
        self.tracker = CallTracker(self.layer, self)
        self.tracker.attach()

    def install(self, due: frozenset[int] = frozenset()) -> None:
        """Do what the Policy says, as far as that is anything; ``due`` is what earlier layers have due in this one."""
        if self.tracker is not None or self.decided is not None:
            return
        handle, span, layer = self.handle, self.span, self.layer
        assert span is not None
        boundary = self.settings.boundary
        if not self.whole:
            kind = self.kind or handle.kinds[type(layer)]
            resolved = self.resolved
            self.program = compile_layer(self.index, kind, resolved.decisions, resolved.boundary, handle.ledger, due)
            if not self.program.idle:
                self.decided = DecidedLayer(layer, self.program, handle.manager, span)
                self.decided.changed = self.watch
                return
        if self.noticed:
            return
        if isinstance(boundary, Swap) and self.whole:
            line = handle.ledger.line(self.index, BOUNDARY)
            self.wrappers.wrap(layer, lambda forward: swap_input(forward, span, boundary, line, handle.manager))
            self.noticed = True
        elif due:
            self.wrappers.wrap(layer, lambda forward: pass_by(forward, span))
            self.noticed = True

    def remove(self) -> None:
        self._undo()
        self.wrappers.remove()

    def _undo(self) -> None:
        if self.tracker is not None:
            self.tracker.detach()
            self.tracker = None
        if self.decided is not None:
            self.decided.wrappers.remove()
            self.decided = None

    # While the layer is learnt, the tracker tells the follower and the follower the watcher.

    def layer_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.watcher = Watcher(self.layer)
        self.watcher.layer_begins(args, kwargs)

    def call_begins(self, name: str, site: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self.watcher is not None
        self.watcher.call_begins(name, site, args, kwargs)

    def call_ends(self, output: Any) -> None:
        assert self.watcher is not None
        self.watcher.call_ends(output)

    def layer_ends(self) -> None:
        assert self.watcher is not None
        self.watcher.layer_ends()
        seen, self.watcher = self.watcher.result(), None
        assert self.tracker is not None
        if not seen.packs or not self.tracker.complete:  # without gradients, or to the end, there is nothing to learn
            return
        self.tracker.detach()
        self.tracker = None
        kind = layer_kind(self.layer, seen)
        if type(self.layer) not in self.handle.kinds:
            self.handle.learnt(self.layer, kind)
            return
        self.kind = kind  # it took another way than its class: from now on it has a kind of its own
        policy = Policy((self.settings,), origin=self.handle.policy.origin)
        self.resolved = resolve(policy, Catalogue((kind.catalogue,)), require_match=False).layers[0]
        self.install()


def _by_operator(settings: LayerPolicy) -> bool:
    """Whether a layer's operators are decided one by one."""
    if isinstance(settings.default, Recompute):
        return any(isinstance(rule.decision, Keep) for rule in settings.rules)
    return isinstance(settings.default, Swap) or bool(settings.rules)

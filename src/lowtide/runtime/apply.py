"""Carry out a Policy on a live model."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from lowtide._torch_private import compiled_call
from lowtide.errors import PolicyError
from lowtide.operators.calls import CallTracker
from lowtide.operators.kinds import LayerKind, layer_kind
from lowtide.operators.layers import Layers, find_layers
from lowtide.operators.observe import Watcher
from lowtide.policy import Catalogue, Keep, LayerPolicy, Policy, Recompute, Resolution, Swap, Unused, resolve
from lowtide.runtime.communication import GatherAgain, communicate, repeat_collectives, warn_of_idle_settings
from lowtide.runtime.compiled import CompiledLayer, has_compiled
from lowtide.runtime.intercept import Wrappers
from lowtide.runtime.layer import DecidedLayer, Span, pass_by, swap_input
from lowtide.runtime.ledger import Ledger
from lowtide.runtime.limits import Limits
from lowtide.runtime.program import BOUNDARY, LayerProgram, compile_layer
from lowtide.runtime.refuse import refuse_compilation
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
    warn_of_idle_settings(policy)
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
        self.gathering = [
            layer.register_forward_pre_hook(GatherAgain(index))
            for index, layer in enumerate(layers.modules if policy.parallel_optimizer_comm_recompute else ())
        ]
        if any(_by_operator(one) or one.boundary != Keep() or one.communication for one in policy.layers):
            classes = set()
            by_operator = [one for one in self.followers if not one.whole and not one.compiled]
            # A layer that is recomputed as a whole is learnt only for the number of its operators.
            counted = [one for one in self.followers if one.settings.boundary != Keep() and not one.compiled]
            for follower in [*by_operator, *counted]:
                if follower.kind_of not in classes:
                    classes.add(follower.kind_of)
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
        for hook in self.gathering:
            hook.remove()
        self.manager.close()

    def learnt(self, kind_of: type[nn.Module], kind: LayerKind) -> None:
        """A class of layers is known: its layers do from now on what the Policy says."""
        self.kinds[kind_of] = kind
        classes = {one.kind_of for one in self.followers if not one.whole and not one.compiled}
        complete = classes <= set(self.kinds)
        catalogues = {name: known.catalogue for name, known in self.kinds.items()}
        # A class that has not run yet counts as many operators as this one; there is nothing better to go by.
        catalogue = Catalogue(tuple(catalogues.get(one.kind_of, kind.catalogue) for one in self.followers))
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
        for follower in self.followers:
            if not follower.compiled and (follower.kind_of in self.kinds or follower.whole):
                follower.install()
        self._reach()

    def watch_after(self, frozen: _Follower) -> None:
        """A layer whose parameters and input need no gradients saves nothing: learn its class from the next one."""
        if frozen.kind_of in self.kinds:
            frozen.install()
            return
        alike = [one for one in self.followers if (one.kind_of, one.whole) == (frozen.kind_of, frozen.whole)]
        alike[(alike.index(frozen) + 1) % len(alike)].watch()

    def _reach(self) -> None:
        """Let layers in which something of an earlier layer is due take note of it."""
        reach = 0
        for follower in self.followers:
            if follower.span is None:
                continue
            if reach > 0 and not follower.installed:
                passing = partial(pass_by, span=follower.span, index=follower.index)
                follower.wrappers.wrap(follower.layer, passing, compiled_call(follower.layer))
                follower.installed = True
            reach = max(reach - follower.span.count, follower.longest)
        # The last layer starts what is due when backward begins.


class _Follower:
    """What is attached to one layer: nothing, a checkpoint, a tracker that learns, or its decisions at work."""

    def __init__(self, handle: Handle, index: int) -> None:
        self.handle, self.index = handle, index
        self.layer = handle.layers.modules[index]
        self.kind_of = type(self.layer)
        """Its class when the Policy was applied: ``fully_shard`` gives a layer another one."""
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
        self.installed = False
        self.compiled_layer: CompiledLayer | None = None
        self.compiled = has_compiled(self.layer)
        if self.whole:
            communicate(self.wrappers, self.layer, index, handle.policy)
        if self.compiled:
            self._install_compiled()

    @property
    def longest(self) -> int:
        """The largest prefetch of the layer."""
        boundary = self.settings.boundary.prefetch if isinstance(self.settings.boundary, Swap) else 0
        return max(boundary, self.program.longest if self.program is not None else 0)

    def watch(self) -> None:
        """Learn the layer when it next runs with gradients."""
        self._undo()
        self.tracker = CallTracker(self.layer, self)
        self.tracker.attach()

    def install(self) -> None:
        """Do what the Policy says, as far as that is anything."""
        if self.installed or self.tracker is not None:
            return
        handle, span = self.handle, self.span
        assert span is not None
        if self.whole:
            boundary = self.settings.boundary
            if isinstance(boundary, Swap):
                line = handle.ledger.line(self.index, BOUNDARY)
                self.wrappers.wrap(
                    self.layer, lambda forward: swap_input(forward, span, boundary, line, handle.manager)
                )
                self.installed = True
            return
        kind = self.kind or handle.kinds[self.kind_of]
        decisions = repeat_collectives(self.index, kind, self.resolved)
        self.program = compile_layer(self.index, kind, decisions, self.resolved.boundary, handle.ledger)
        if not self.program.empty:
            self.decided = DecidedLayer(self.layer, self.program, handle.manager, span)
            self.decided.changed = self.watch
            self.installed = True

    def _install_compiled(self) -> None:
        """A compiled layer has no operators: what it saves is swapped as a whole, or not at all."""
        if self.settings.rules or self.settings.communication:
            raise PolicyError(
                f"layer {self.index} is compiled and its operators cannot be decided one by one ({self.settings});"
                " recompute or swap the layer as a whole, or do not compile it"
            )
        if isinstance(self.settings.default, Swap) or self.settings.boundary != Keep():
            last = self.index == len(self.handle.layers.modules) - 1
            layer, settings, manager = self.layer, self.settings, self.handle.manager
            layer_at_work = CompiledLayer(layer, self.index, settings.default, settings.boundary, manager, last)
            self.compiled_layer = layer_at_work
            self.installed = True

    def remove(self) -> None:
        self._undo()
        if self.compiled_layer is not None:
            self.compiled_layer.wrappers.remove()
        self.wrappers.remove()

    def _undo(self) -> None:
        if self.tracker is not None:
            self.tracker.detach()
            self.tracker = None
        if self.decided is not None:
            self.decided.wrappers.remove()
            self.decided = None
        self.installed = False

    # While the layer is learnt, the tracker tells the follower and the follower the watcher.

    def layer_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        refuse_compilation(self.index)
        self.watcher = Watcher(self.layer)
        self.watcher.layer_begins(args, kwargs)

    def call_begins(self, name: str, site: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self.watcher is not None
        self.watcher.call_begins(name, site, args, kwargs)

    def call_ends(self, output: Any) -> None:
        assert self.watcher is not None
        self.watcher.call_ends(output)

    def layer_ends(self, *, completed: bool) -> None:
        assert self.watcher is not None
        self.watcher.layer_ends()
        seen, self.watcher = self.watcher.result(), None
        if not completed or not (seen.packs or torch.is_grad_enabled()):  # without gradients: nothing to learn
            return
        assert self.tracker is not None
        self.tracker.detach()
        self.tracker = None
        if not seen.packs:
            self.handle.watch_after(self)
            return
        kind = layer_kind(self.layer, seen)
        if self.kind_of not in self.handle.kinds:
            self.handle.learnt(self.kind_of, kind)
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

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
from lowtide.policy import Catalogue, Keep, Operator, Policy, Recompute, Resolution, Swap, Unused, resolve
from lowtide.runtime.recompute import RecomputingLayer

__all__ = ["Handle", "apply"]


def apply(model: nn.Module, policy: Policy, *, layers: str | None = None) -> Handle:
    """Make ``model`` keep or recompute each operator's tensors as ``policy`` says.

    The operators of a kind of layer are learnt while its first layer runs for the first time; that layer keeps
    everything in that step. A pattern that matches nothing raises :class:`~lowtide.errors.UnmatchedError` then.
    Swapping is not carried out yet, and refused.

    ``handle = lowtide.apply(model, policy)``; ``handle.remove()`` leaves the model as it was.
    """
    found = find_layers(model, layers)
    if len(found.modules) != len(policy.layers):
        raise PolicyError(
            f"the policy decides {len(policy.layers)} layers and {found.path or 'the model'} has {len(found.modules)};"
            " make the policy for this model, or name its layers"
        )
    for place, layer in enumerate([*policy.layers, policy.root]):
        if any(isinstance(d, Swap) for d in (layer.default, layer.boundary, *(rule.decision for rule in layer.rules))):
            where = "the root" if place == len(policy.layers) else f"layer {place}"
            raise PolicyError(f"{where} is to be swapped, which this version cannot do; recompute or keep it")
    return Handle(found, policy)


class Handle:
    """A Policy at work on a model."""

    def __init__(self, layers: Layers, policy: Policy) -> None:
        self.layers, self.policy = layers, policy
        self.kinds: dict[type[nn.Module], LayerKind] = {}
        self.resolution: Resolution | None = None
        self._followers = [_Follower(self, index) for index in range(len(layers.modules))]

    @property
    def unused(self) -> tuple[Unused, ...]:
        """The settings that had no effect; known after the first step."""
        return self.resolution.unused if self.resolution is not None else ()

    @property
    def kept(self) -> tuple[tuple[int, str], ...]:
        """The (layer, operator) pairs that were to be recomputed and are kept, since their call cannot be repeated."""
        return tuple(
            (follower.index, name)
            for follower in self._followers
            if isinstance(follower.listener, RecomputingLayer)
            for name in follower.listener.refused
        )

    def remove(self) -> None:
        """Leave the model as it was."""
        for follower in self._followers:
            follower.remove()

    def _learnt(self, module: nn.Module, kind: LayerKind) -> None:
        """A kind of layer is known; with the last one the whole Policy can be resolved."""
        self.kinds[type(module)] = kind
        if all(type(layer) in self.kinds for layer in self.layers.modules):
            catalogues = {name: kind.catalogue for name, kind in self.kinds.items()}
            catalogue = Catalogue(tuple(catalogues[type(layer)] for layer in self.layers.modules))
            self.resolution = resolve(self.policy, catalogue)


class _Follower:
    """What is attached to one layer: nothing, a checkpoint, a watcher that learns, or a listener that rebuilds."""

    def __init__(self, handle: Handle, index: int) -> None:
        self.handle, self.index = handle, index
        self.layer = handle.layers.modules[index]
        self.settings = handle.policy.layers[index]
        self.tracker: CallTracker | None = None
        self.wrapped = False
        if self.settings.default == Recompute() and not any(rule.decision == Keep() for rule in self.settings.rules):
            self.wrapped = True
            self.layer.forward = partial(checkpoint, self.layer.forward, use_reentrant=False)
        elif self.settings.default == Recompute() or self.settings.rules:
            self.tracker = CallTracker(self.layer, self)
            self.tracker.attach()
        self.listener: Any = None
        self.kind: LayerKind | None = None
        self.learn_again = False

    def remove(self) -> None:
        if self.wrapped:
            del self.layer.forward
        if self.tracker is not None:
            self.tracker.detach()

    # The tracker tells the follower, and the follower whoever is at work.

    def layer_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kind = None if self.learn_again else self.kind or self.handle.kinds.get(type(self.layer))
        if kind is None:
            self.listener = Watcher(self.layer)
        elif not isinstance(self.listener, RecomputingLayer) or self.listener.kind is not kind:
            self.listener = RecomputingLayer(kind, self._decisions(kind.catalogue))
        self.listener.layer_begins(args, kwargs)

    def call_begins(self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.listener.call_begins(name, function, args, kwargs)

    def call_ends(self, output: Any) -> None:
        self.listener.call_ends(output)

    def layer_ends(self) -> None:
        self.listener.layer_ends()
        if isinstance(self.listener, Watcher):
            seen, self.listener = self.listener.result(), None
            if seen.packs:  # without gradients there was nothing to learn
                self.kind, self.learn_again = layer_kind(self.layer, seen), False
                if type(self.layer) not in self.handle.kinds:
                    self.handle._learnt(self.layer, self.kind)
        elif self.listener.changed:  # it took another way than its kind: it is learnt anew, on its own
            self.learn_again = True

    def _decisions(self, operators: tuple[Operator, ...]) -> Any:
        policy = Policy((self.settings,), origin=self.handle.policy.origin)
        return resolve(policy, Catalogue((operators,)), require_match=False).layers[0].decisions

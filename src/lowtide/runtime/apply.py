"""Carry out a Policy on a live model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakMethod, WeakSet

from torch import nn

from lowtide.config.load import load_policy
from lowtide.errors import PolicyError
from lowtide.operators.checkpointing import Checkpointing
from lowtide.operators.kinds import LayerKind
from lowtide.operators.layers import Layers, check_module, find_layers
from lowtide.operators.wrappers import Hook
from lowtide.planner.plan import Plan
from lowtide.policy import Catalogue, Keep, Operator, Policy, Resolution, Swap, Unused, format_layers, resolve
from lowtide.policy.idle import idle_settings
from lowtide.runtime.communication import ReshardAfterForward
from lowtide.runtime.follower import LayerFollower, Shared, Structure
from lowtide.runtime.graph import GraphBytes, GraphLayer
from lowtide.runtime.ledger import Ledger
from lowtide.runtime.limits import Limits
from lowtide.runtime.receipt import Receipt, write_receipt
from lowtide.runtime.schedule import Span
from lowtide.runtime.swap import SwapManager

__all__ = ["Handle", "apply", "policy_of"]

_HANDLES: WeakSet[Handle] = WeakSet()
"""Those at work. A layer has one: a second one would take the first one's work for the layer's."""


def apply(
    model: nn.Module,
    policy: Policy | Plan | str | Path,
    *,
    layers: str | None = None,
    limits: Limits | None = None,
    verify: bool = False,
    allow_unmatched: bool = False,
    disable_checkpointing: bool = False,
    profiles: Mapping[Structure, LayerKind] | None = None,
) -> Handle:
    """Make ``model`` keep, recompute or swap each operator's tensors as ``policy`` says.

    ``policy`` may be a Plan, whose Policy is applied, or the name of a file that :func:`lowtide.load_policy` reads.
    Layers with the same modules are profiled once, in the first run of the first of them; that layer keeps everything
    in that step. If its input has no gradient, which makes it save less than the others, so does the second. A pattern
    that matches nothing raises :class:`~lowtide.errors.UnmatchedError` then.

    ``layers`` names the module that holds the layers, where the longest run of equal children is not it. ``limits``
    caps what swapping may take. ``verify`` compares every tensor that is unpacked with what was saved, in every step,
    which is slow. ``allow_unmatched`` makes a pattern that matches nothing a line in the receipt and no error: in a
    pipeline stage, it may match in another. Where layers have gradient checkpointing already, which would recompute
    them whatever the Policy says, ``disable_checkpointing`` turns it off until the Handle is removed; without it this
    raises. ``profiles`` are those of an earlier Handle of the model: layers in them are not profiled again.

    ``handle = lowtide.apply(model, policy)``; ``handle.receipt()`` says what happened; ``handle.remove()`` restores
    the model, and so does the end of ``with lowtide.apply(model, policy):``. If this raises, the model is
    unchanged.
    """
    check_module(model, "apply")
    found = find_layers(model, layers)
    policy = policy_of(policy).for_layers(len(found.modules))
    if len(found.modules) != len(policy.layers):
        raise PolicyError(
            f"the policy decides {len(policy.layers)} layers and {found.path or 'the model'} has {len(found.modules)};"
            " make the policy for this model, or name its layers"
        )
    taken = [one for one in _HANDLES if not set(one.layers.modules).isdisjoint(found.modules)]
    if taken:
        raise PolicyError(
            f"a Policy is applied to the layers of {found.path or 'the model'} already: call remove() of its Handle, or"
            " of the run of adapt() that has applied it; adapt() takes your own decisions as adapt(policy=...)"
        )
    checkpointing = Checkpointing(model, found)
    if not disable_checkpointing and (on := checkpointing.find()):
        raise PolicyError(
            f"the model has gradient checkpointing on ({on}), which recomputes whole layers whatever the Policy says;"
            " turn it off before, as by model.gradient_checkpointing_disable(), or let lowtide do it:"
            " apply(..., disable_checkpointing=True)"
        )
    handle = Handle(found, policy, limits or Limits(), checkpointing, verify=verify, allow_unmatched=allow_unmatched)
    for text in idle_settings(policy):
        handle.ledger.idle(text)
    try:
        if disable_checkpointing:
            checkpointing.turn_off()
        handle.start(profiles or {})
    except BaseException:
        handle.remove()
        raise
    return handle


def policy_of(given: object) -> Policy:
    """The Policy of what a caller may give for one; PolicyError that says what that is."""
    if isinstance(given, str | Path):
        return load_policy(given)
    if isinstance(given, Plan):
        return given.policy
    if not isinstance(given, Policy):
        raise PolicyError(
            f"expected a Policy, a Plan or the name of a file that holds one; found {type(given).__name__}"
        )
    return given


class Handle:
    """A Policy at work on a model."""

    def __init__(
        self,
        layers: Layers,
        policy: Policy,
        limits: Limits,
        checkpointing: Checkpointing,
        *,
        verify: bool = False,
        allow_unmatched: bool = False,
    ) -> None:
        self.layers, self.policy, self.allow_unmatched = layers, policy, allow_unmatched
        self.checkpointing = checkpointing
        self.profiles: dict[Structure, LayerKind] = {}
        """What is known of the layers, by the classes of their modules."""
        self.resolution: Resolution | None = None
        self.ledger = Ledger()
        self.manager = SwapManager(limits, self.ledger)
        shared = Shared(policy, self.manager, self.profiles, verify, self._profiled, self._profile_next, self._is_apart)
        self.followers = [LayerFollower(index, layer, shared) for index, layer in enumerate(layers.modules)]
        self._graphs = list(dict.fromkeys(one.graph for one in self.followers if one.graph is not None))
        self._gathering: list[Any] = []

    def start(self, known: Mapping[Structure, LayerKind]) -> None:
        """Carry the Policy out where the layers' profiles are known; profile the others when they next run.

        The model is not touched before this.
        """
        _HANDLES.add(self)
        for graph in self._graphs:
            graph.on_traced.append(WeakMethod(self._traced))
        self._traced()
        for follower in self.followers:
            follower.start()
            if self.policy.communication.reshard_after_forward:
                hook = Hook(ReshardAfterForward(follower.index, self.ledger))
                self._gathering.append(follower.layer.register_forward_pre_hook(hook))
        if not any(
            one.rules or isinstance(one.default, Swap) or one.boundary != Keep() or one.collectives
            for one in self.policy.layers
        ):
            return
        unknown: set[Structure] = set()
        for follower in self.followers:
            structure = follower.structure
            if structure in unknown or structure in self.profiles:
                continue
            if structure in known and (not follower.compiled or follower.graph is not None):
                self._profiled(structure, known[structure])
            elif not follower.compiled:
                unknown.add(structure)
                follower.watch()

    @property
    def unused(self) -> tuple[Unused, ...]:
        """The settings that had no effect; known after the first step."""
        return self.resolution.unused if self.resolution is not None else ()

    @property
    def kept(self) -> tuple[tuple[int, str], ...]:
        """The (layer, operator) pairs that were to be recomputed and are kept, since their calls cannot be replayed."""
        programs = [(follower.index, follower.program) for follower in self.followers]
        return tuple((index, name) for index, program in programs if program for name in program.refused)

    def receipt(self) -> Receipt:
        """What happened since the last receipt, or since the Policy was applied. Waits for the device."""
        more = [f"{name} in layer {index} is kept: its call cannot be replayed" for index, name in self.kept]
        more += self.ledger.without_effect
        if profiled := sorted(self.ledger.profiled):
            which = f"layer {profiled[0]}" if len(profiled) == 1 else f"layers {format_layers(profiled)}"
            more.append(f"{which} kept everything in one step, to be profiled")
        profiles = {one.index: one.profile for one in self.followers}
        receipt = write_receipt(self.policy, self.resolution, profiles, self.ledger, more, self.compiled_bytes())
        self.ledger.clear()
        return receipt

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Restore the model."""
        for follower in self.followers:
            follower.remove()
        for graph in self._graphs:
            graph.unsubscribe(self._traced)
        while self._gathering:
            self._gathering.pop().remove()
        self.manager.close()
        self.checkpointing.restore()
        _HANDLES.discard(self)

    def _profiled(self, structure: Structure, kind: LayerKind) -> None:
        """Layers of one structure are known: from now on they do what the Policy says."""
        self.profiles[structure] = kind
        self._install(kind.catalogue)

    def _traced(self) -> None:
        """Layers were traced by torch.compile; once all are, it is known which settings have no effect."""
        catalogues = [one.catalogue for one in self.followers]
        if self._graphs and self.resolution is None and None not in catalogues:
            catalogue = Catalogue(tuple(one for one in catalogues if one is not None))
            self.resolution = resolve(self.policy, catalogue, require_match=not self.allow_unmatched)

    def compiled_bytes(self) -> dict[int, GraphBytes]:
        """What each compiled layer holds, where its graph is known."""
        found: dict[int, GraphBytes] = {}
        seen: dict[GraphLayer, int] = {}
        for one in self.followers:
            if one.graph is not None and one.graph.bytes:  # layers with equal decisions may share one graph
                position = seen.setdefault(one.graph, 0)
                seen[one.graph] += 1
                found[one.index] = one.graph.bytes[min(position, len(one.graph.bytes) - 1)]
        return found

    def _install(self, unknown: tuple[Operator, ...]) -> None:
        """Carry the Policy out in all layers that are known.

        A structure that has not run yet counts as many operators as ``unknown``; there is nothing better to go by.
        """
        complete = {one.structure for one in self.followers if not one.compiled} <= set(self.profiles)
        profiles = (one.profile for one in self.followers)
        catalogue = Catalogue(tuple(known.catalogue if known is not None else unknown for known in profiles))
        resolution = resolve(self.policy, catalogue, require_match=complete and not self.allow_unmatched)
        if complete:
            self.resolution = resolution
        offset, due = 0, frozenset[int]()
        for follower, names, resolved in zip(self.followers, catalogue.layers, resolution.layers, strict=True):
            follower.resolved = resolved
            follower.span = span = Span(self.manager.schedule, offset, len(names), follower is self.followers[-1])
            offset += span.count
            if follower.structure in self.profiles or follower.compiled:
                follower.install(due)
            due = frozenset(number - span.count for number in due | follower.due if number > span.count)

    def _profile_next(self, frozen: LayerFollower) -> None:
        """A layer that needs no gradients saves nothing: profile the next layer of its structure."""
        if frozen.structure in self.profiles:  # it was profiled before, and was frozen since
            frozen.install()
            return
        alike = self._alike(frozen)
        alike[(alike.index(frozen) + 1) % len(alike)].watch()

    def _is_apart(self, first: LayerFollower) -> bool:
        """Whether a layer whose input has no gradient gets a profile of its own; the next one like it is profiled too.

        After frozen embeddings the first layer saves less than the others, which would all diverge from its profile.
        """
        alike = self._alike(first)
        if first.settings.recomputed_as_a_whole or first is alike[-1] or any(one.own_profile for one in alike):
            return False
        alike[alike.index(first) + 1].watch()
        return True

    def _alike(self, follower: LayerFollower) -> list[LayerFollower]:
        return [one for one in self.followers if one.structure == follower.structure and not one.compiled]

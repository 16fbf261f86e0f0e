"""Carry out a Policy on a live model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from lowtide._torch_private import compiled_call
from lowtide.errors import PolicyError
from lowtide.operators.calls import CallTracker
from lowtide.operators.kinds import LayerKind, layer_kind
from lowtide.operators.layers import Layers, find_layers
from lowtide.operators.observe import Watcher
from lowtide.operators.wrappers import Function, Hook, Wrappers
from lowtide.policy import Catalogue, Keep, Operator, Policy, Resolution, Swap, Unused, resolve
from lowtide.runtime.checked import LayerCheck
from lowtide.runtime.collectives import Collectives
from lowtide.runtime.communication import GatherAgain, communicating, decide_collectives, warn_of_idle_settings
from lowtide.runtime.compiled import CompiledLayer, has_compiled
from lowtide.runtime.layer import DecidedLayer, Span, pass_by, swap_input, timed_again
from lowtide.runtime.ledger import Ledger, Line, where
from lowtide.runtime.limits import Limits
from lowtide.runtime.program import BOUNDARY, WHOLE, LayerProgram, compile_layer
from lowtide.runtime.receipt import Receipt, write_receipt
from lowtide.runtime.refuse import refuse_compilation, refuse_compiled_function
from lowtide.runtime.swap import SwapManager
from lowtide.runtime.whole import WholeLayer

__all__ = ["Handle", "Structure", "apply", "structure_of"]

Structure: TypeAlias = tuple[tuple[str, type[nn.Module]], ...]
"""The modules of a layer and their classes. Layers alike in that are expected to have the same operators; layers of one
class need not be alike: some have experts where others have a dense block."""


def structure_of(layer: nn.Module) -> Structure:
    """What a layer is made of."""
    return tuple((name, type(module)) for name, module in layer.named_modules())


def apply(
    model: nn.Module,
    policy: Policy,
    *,
    layers: str | None = None,
    limits: Limits | None = None,
    verify: bool = False,
    allow_unmatched: bool = False,
    profiles: Mapping[Structure, LayerKind] | None = None,
) -> Handle:
    """Make ``model`` keep, recompute or swap each operator's tensors as ``policy`` says.

    The operators of layers with the same modules are learnt while the first of them runs for the first time; that layer
    keeps everything in that step. A pattern that matches nothing raises :class:`~lowtide.errors.UnmatchedError` then.

    ``layers`` names the module that holds the layers, where the longest run of equal children is not it. ``limits``
    caps what swapping may take. ``verify`` checks every tensor that comes back against what left, in every step, which
    is slow. ``allow_unmatched`` makes a pattern that matches nothing a line in the receipt rather than an error: in a
    part of a model, such as a pipeline stage, it may match elsewhere. ``profiles`` are the profiles of the model's
    layers, such as the ``kinds`` of an earlier Handle: these layers are not profiled again.

    ``handle = lowtide.apply(model, policy)``; ``handle.receipt()`` says what happened; ``handle.remove()`` leaves the
    model as it was, and so does the end of ``with lowtide.apply(model, policy):``. Whatever this raises, the model is
    as it was too.
    """
    found = find_layers(model, layers)
    policy = policy.for_layers(len(found.modules))
    if len(found.modules) != len(policy.layers):
        raise PolicyError(
            f"the policy decides {len(policy.layers)} layers and {found.path or 'the model'} has {len(found.modules)};"
            " make the policy for this model, or name its layers"
        )
    warn_of_idle_settings(policy)
    handle = Handle(model, found, policy, limits or Limits(), verify=verify, allow_unmatched=allow_unmatched)
    handle.start(profiles or {})
    return handle


class Handle:
    """A Policy at work on a model."""

    def __init__(
        self,
        model: nn.Module,
        layers: Layers,
        policy: Policy,
        limits: Limits,
        *,
        verify: bool = False,
        allow_unmatched: bool = False,
    ) -> None:
        self.layers, self.policy, self.verify, self.allow_unmatched = layers, policy, verify, allow_unmatched
        self.kinds: dict[Structure, LayerKind] = {}
        self.resolution: Resolution | None = None
        self.ledger = Ledger()
        self.manager = SwapManager(limits, self.ledger)
        found = Counter(module for layer in layers.modules for module in layer.modules())
        self.shared_modules = {module for module, layers_with_it in found.items() if layers_with_it > 1}
        self.followers = [_Follower(self, index) for index in range(len(layers.modules))]
        self._gathering: list[Any] = []

    def start(self, known: Mapping[Structure, LayerKind]) -> None:
        """Do what the Policy says where the operators are known; learn those that are not when they next run.

        The model is not touched before this, and not if this raises.
        """
        try:
            self._start(known)
        except BaseException:
            self.remove()
            raise

    def _start(self, known: Mapping[Structure, LayerKind]) -> None:
        layers = self.policy.layers
        for follower in self.followers:
            follower.start()
            if self.policy.communication.reshard_after_forward:
                hook = Hook(GatherAgain(follower.index))
                self._gathering.append(follower.layer.register_forward_pre_hook(hook))
        if not any(
            one.rules or isinstance(one.default, Swap) or one.boundary != Keep() or one.collectives for one in layers
        ):
            return
        unknown: set[Structure] = set()
        for follower in self.followers:
            kind_of = follower.kind_of
            if follower.compiled or kind_of in unknown or kind_of in self.kinds:
                continue
            if kind_of in known:
                self._learnt(kind_of, known[kind_of])
            else:
                unknown.add(kind_of)
                follower.watch()

    @property
    def unused(self) -> tuple[Unused, ...]:
        """The settings that had no effect; known after the first step."""
        return self.resolution.unused if self.resolution is not None else ()

    @property
    def kept(self) -> tuple[tuple[int, str], ...]:
        """The (layer, operator) pairs that were to be recomputed and are kept, since their call cannot be repeated."""
        programs = [(follower.index, follower.program) for follower in self.followers]
        return tuple((index, name) for index, program in programs if program for name in program.refused)

    def receipt(self) -> Receipt:
        """What happened since the last receipt, or since the Policy was applied. Waits for the device."""
        more = [f"{name} in {where(index)} is kept: its call cannot be repeated" for index, name in self.kept]
        kinds = {one.index: one.kind or self.kinds.get(one.kind_of) for one in self.followers}
        receipt = write_receipt(self.policy, self.resolution, kinds, self.ledger, more)
        self.ledger.clear()
        return receipt

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Leave the model as it was."""
        for follower in self.followers:
            follower.remove()
        while self._gathering:
            self._gathering.pop().remove()
        self.manager.close()

    def _learnt(self, kind_of: Structure, kind: LayerKind) -> None:
        """Layers of one structure are known: its layers do from now on what the Policy says."""
        self.kinds[kind_of] = kind
        self._install(kind.catalogue)

    def _install(self, unknown: tuple[Operator, ...]) -> None:
        """Do what the Policy says in all that is known.

        A structure that has not run yet counts as many operators as ``unknown``; there is nothing better to go by.
        """
        structures = {one.kind_of for one in self.followers if not one.compiled}
        complete = structures <= set(self.kinds)
        catalogues = {name: known.catalogue for name, known in self.kinds.items()}
        catalogue = Catalogue(tuple(catalogues.get(one.kind_of, unknown) for one in self.followers))
        resolution = resolve(self.policy, catalogue, require_match=complete and not self.allow_unmatched)
        if complete:
            self.resolution = resolution
        due: frozenset[int] = frozenset()
        last = self.followers[-1]
        offset = 0
        for follower, names, resolved in zip(self.followers, catalogue.layers, resolution.layers, strict=True):
            follower.resolved = resolved
            follower.span = Span(self.manager, offset, len(names), follower is last)
            offset += len(names)
        for follower in self.followers:
            assert follower.span is not None
            if follower.kind_of in self.kinds or follower.compiled:
                follower.install(due)
            count = follower.span.count
            due = frozenset(number - count for number in due | follower.due if number > count)

    def _watch_after(self, frozen: _Follower) -> None:
        """A layer whose parameters and input need no gradients saves nothing: learn it from the next one alike."""
        if frozen.kind_of in self.kinds:
            frozen.install()
            return
        alike = [one for one in self.followers if one.kind_of == frozen.kind_of and not one.compiled]
        alike[(alike.index(frozen) + 1) % len(alike)].watch()


class _Follower:
    """What is attached to one layer: nothing, a checkpoint, a tracker that learns, or its decisions at work."""

    def __init__(self, handle: Handle, index: int) -> None:
        self.handle, self.index = handle, index
        self.layer = handle.layers.modules[index]
        self.kind_of = structure_of(self.layer)
        """As it was when the Policy was applied: ``fully_shard`` gives modules another class."""
        self.settings = handle.policy.layers[index]
        self.whole = self.settings.recomputed_as_a_whole
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
        self.collectives: Collectives | None = None
        self.compiled_layer: CompiledLayer | None = None
        self.compiled = has_compiled(self.layer)
        if self.compiled and (self.settings.rules or self.settings.collectives):
            raise PolicyError(
                f"layer {self.index} is compiled and its operators cannot be decided one by one ({self.settings});"
                " recompute or swap the layer as a whole, or do not compile it"
            )

    def start(self) -> None:
        """Install what needs no profile of the layer."""
        self._recompute_whole()
        if self.compiled:
            self._install_compiled()

    def _recompute_whole(self) -> None:
        if self.whole:
            line = self.handle.ledger.line(self.index, WHOLE)
            self.wrappers.wrap(self.layer, lambda forward: self._unless_learning(forward, line))

    def _install_compiled(self) -> None:
        """A compiled layer has no operators: what it saves is swapped as a whole, or not at all."""
        settings, handle = self.settings, self.handle
        if isinstance(settings.default, Swap) or settings.boundary != Keep():
            last = self.index == len(handle.layers.modules) - 1
            self.compiled_layer = CompiledLayer(
                self.layer, self.index, settings.default, settings.boundary, handle.manager, last
            )
            self.compiled_layer.attach()

    def _unless_learning(self, forward: Function, line: Line) -> Function:
        """Recompute the whole layer, but not while its operators are learnt: a checkpoint would hide them."""
        replayed = WholeLayer(self.layer, line.whose)
        again = replayed.repeated(timed_again(forward, self.handle.ledger, line))
        recomputed = communicating(forward, again, self.layer, self.index, self.handle.policy)
        whole = replayed.around(recomputed, forward)

        def unless_learning(*args: Any, **kwargs: Any) -> Any:
            return whole(*args, **kwargs) if self.tracker is None else forward(*args, **kwargs)

        return unless_learning

    @property
    def due(self) -> frozenset[int]:
        """How many operators after the layer's first something of it is due."""
        if self.program is not None:
            return self.program.due
        if self.resolved is None or self.span is None or not isinstance(self.resolved.boundary, Swap):
            return frozenset()
        prefetch = self.resolved.boundary.prefetch
        return frozenset((prefetch, self.span.count - 1 + prefetch))

    def watch(self) -> None:
        """Learn the layer when it next runs with gradients."""
        self._undo()
        self.tracker = CallTracker(self.layer, self, partial(refuse_compiled_function, self.index))
        self.tracker.attach()

    def install(self, due: frozenset[int] = frozenset()) -> None:
        """Do what the Policy says, as far as that is anything; ``due`` is what earlier layers have due in this one."""
        if self.tracker is not None or self.decided is not None:
            return
        handle, span, layer = self.handle, self.span, self.layer
        assert span is not None
        boundary = self.resolved.boundary
        if not self.whole and not self.compiled:
            kind = self.kind or handle.kinds[self.kind_of]
            decisions = decide_collectives(self.index, kind, self.resolved, handle.policy)
            self.program = compile_layer(self.index, kind, decisions, self.resolved.boundary, handle.ledger, due)
            if not self.program.idle:
                check = LayerCheck(self.index, layer, kind) if handle.verify else None
                # One that once took another way than its class, or shares modules with others, is followed as a whole.
                narrow = self.kind is None and not handle.shared_modules.intersection(layer.modules())
                self.decided = DecidedLayer(
                    layer,
                    self.program,
                    handle.manager,
                    span,
                    check,
                    collectives=self._reissue(self.program),
                    narrow=narrow,
                )
                self.decided.changed = self.watch
                self.decided.attach()
                return
        if self.noticed:
            return
        if isinstance(boundary, Swap) and self.whole and not self.compiled:
            line = handle.ledger.line(self.index, BOUNDARY)
            self.wrappers.wrap(layer, lambda forward: swap_input(forward, span, boundary, line, handle.manager))
            self.noticed = True
        elif due and self.compiled_layer is None:
            self.wrappers.wrap(layer, lambda forward: pass_by(forward, span, self.index), compiled_call(layer))
            self.noticed = True

    def _reissue(self, program: LayerProgram) -> Collectives | None:
        """Capture the collectives that are re-issued, from now on in every run. See [Note: re-issued collectives]."""
        if self.collectives is None and any(program.reissued):
            self.collectives = Collectives(self.index, self.handle.ledger)
            self.collectives.attach(self.layer)
        if self.collectives is not None:
            self.collectives.wanted = program.reissued
        return self.collectives

    def remove(self) -> None:
        self._undo()
        if self.compiled_layer is not None:
            self.compiled_layer.wrappers.remove()
        if self.collectives is not None:
            self.collectives.remove()
            self.collectives = None
        self.wrappers.remove()

    def _undo(self) -> None:
        if self.tracker is not None:
            self.tracker.detach()
            self.tracker = None
        if self.decided is not None:
            self.decided.remove()
            self.decided = None

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

    def collective_begins(self, name: str) -> None:
        assert self.watcher is not None
        self.watcher.collective_begins(name)

    def layer_ends(self, *, completed: bool) -> None:
        if self.watcher is None:  # it was refused to begin
            return
        self.watcher.layer_ends()
        seen, self.watcher = self.watcher.result(), None
        if not completed or not (seen.packs or torch.is_grad_enabled()):  # without gradients: nothing to learn
            return
        assert self.tracker is not None
        self.tracker.detach()
        self.tracker = None
        if not seen.packs:
            self.handle._watch_after(self)
            return
        kind = layer_kind(self.layer, seen)
        if self.kind_of not in self.handle.kinds:
            self.handle._learnt(self.kind_of, kind)
            return
        self.kind = kind  # it took another way than those alike: from now on it has a kind of its own
        policy = Policy((self.settings,), origin=self.handle.policy.origin)
        self.resolved = resolve(policy, Catalogue((kind.catalogue,)), require_match=False).layers[0]
        self.install()

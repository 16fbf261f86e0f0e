"""Profile what runs in a model outside its layers: embedding, masks, rotary tables, final norm, head and loss.

The root is profiled like a layer, with pauses while a layer runs. A tensor that the root made and a layer saved, such
as a rotary table, is the root's: the layers' profilers report to it every tensor that they see saved. Since it knows
them all by storage, it also knows every byte that one run holds for backward, counted once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowtide._torch_private.compiled import under_compilation
from lowtide._torch_private.storages import storage_bytes
from lowtide.operators.calls import CallTracker
from lowtide.operators.observation import Source
from lowtide.operators.profiler import OnWrite, Profiler
from lowtide.operators.saved import PackHook, kept_apart
from lowtide.operators.wrappers import Hook, around, take_back

__all__ = ["HeldBytes", "Root"]


class HeldBytes(NamedTuple):
    """The bytes that one run of a model holds for backward, each storage once."""

    layers: int
    """What the layers' operators own."""
    boundaries: int
    """What passes from one part to another: the layers' inputs, and the last layer's output."""
    root: int
    """What the operators outside the layers own, wherever it was saved."""
    static: int
    """Parameters, buffers, and what is derived from them alone."""
    kept: int
    """Integers and booleans."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


class _Saved(NamedTuple):
    """A tensor saved inside a layer."""

    source: Source
    storage: int
    storage_bytes: int
    movable: bool


class Root:
    """Profiles the part of a model outside its layers."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        hold: PackHook = kept_apart,
        written: OnWrite | None = None,
    ) -> None:
        self.model, self.layers = model, layers
        self.profiler = Profiler(model, hold=hold, written=written)
        self.tracker = CallTracker(model, self.profiler)
        self.inside: list[_Saved] = []
        self.pausing: nn.Module | None = None
        """The layer that runs now."""
        self.handles: list[Any] = []
        """The hooks on the model and, once it runs with gradients, on its layers."""
        for layer in layers:
            for module in layer.modules():
                self.tracker.paths.pop(module, None)  # the layer's own tracker follows it

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Profile the model while it runs inside this context. Enter it after the contexts that profile the layers."""
        handles = self.handles
        try:
            self.tracker.attach()
            handles.append(self.model.register_forward_pre_hook(Hook(self._begin), prepend=True))
            yield
        finally:
            take_back([self.tracker.detach, *(handle.remove for handle in handles)])
            handles.clear()

    def saved_inside(self, tensor: Tensor, source: Source) -> None:
        """A layer saved a tensor; what comes from outside the layer may be the root's."""
        number = self.profiler.origins.of(tensor).number
        movable = tensor.is_floating_point() or tensor.is_complex()
        self.inside.append(_Saved(source, number, storage_bytes(tensor), movable))
        if source == "root":
            self.profiler.save(tensor)

    def held(self) -> HeldBytes:
        """The bytes of every storage that was saved, each storage once."""
        claims: dict[int, tuple[str, int]] = {}

        def claim(part: str, storage: int, size: int) -> None:
            # A storage that two parts saved, such as a last value that its layer saved too, is the stronger claim's.
            before, _ = claims.get(storage, (part, 0))
            claims[storage] = (min(part, before, key=_CLAIMS.index), size)

        for saved in self.inside:
            if saved.source != "root":  # the root's profiler has packed those
                claim(_part(saved.source, saved.movable, "layers"), saved.storage, saved.storage_bytes)
        for pack in self.profiler.packs:
            claim(_part(pack.source, pack.movable, "root"), pack.storage, pack.storage_bytes)
        sums = dict.fromkeys(HeldBytes._fields, 0)
        for part, size in claims.values():
            sums[part] += size
        return HeldBytes(**sums)

    def _begin(self, module: nn.Module, args: Any) -> None:
        self.inside.clear()  # of a model that runs twice the last run is kept
        self.tracker.paused, self.pausing = False, None  # an interrupted layer may have left it paused
        if len(self.handles) == 1 and torch.is_grad_enabled():  # not in evaluation: hooks make some layers slower
            for layer in self.layers:
                self.handles += around(layer, self._pause, self._resume)

    def _pause(self, layer: nn.Module, args: Any) -> None:
        if under_compilation():  # torch.compile would trace this, not run it
            return
        if self.tracker.stack and not self.tracker.paused:
            self.tracker.paused, self.pausing = True, layer
            self.profiler.pause()

    def _resume(self, layer: nn.Module, args: Any, output: Any) -> None:
        if under_compilation():
            return
        if self.tracker.paused and self.pausing is layer:
            self.tracker.paused, self.pausing = False, None
            self.profiler.resume()


_CLAIMS = ("static", "kept", "boundaries", "layers", "root")


def _part(source: Source, movable: bool, part: str) -> str:
    if source == "static":
        return "static"
    if not movable:
        return "kept"
    return part if source == "operator" else "boundaries"

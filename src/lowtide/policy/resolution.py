"""What a Policy resolved against a model's operators is made of: the model's catalogue, and each layer's decisions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from lowtide.policy.decision import Decision, Keep, Swap
from lowtide.policy.policy import format_layers

__all__ = ["Catalogue", "Operator", "Resolution", "ResolvedLayer", "Setting", "Unused"]


class Operator(NamedTuple):
    """One operator of a layer, as a catalogue lists it."""

    name: str
    """Its dotted path inside the layer: ``feed_forward.mul``."""
    consumers: tuple[str, ...] = ()
    """The operators of the same layer that read its output."""
    aliases: tuple[str, ...] = ()
    """Other dotted paths it is known by: ``mlp.activation_func.silu``. Several operators may share one; one that is the
    own name of another operator means that operator alone."""


class Catalogue(NamedTuple):
    """What a model's layers consist of: the operators of each, in order."""

    layers: tuple[tuple[Operator, ...], ...]
    """One tuple for each layer; layers of one kind should share the same tuple."""


class Unused(NamedTuple):
    """A setting that had no effect."""

    setting: str
    """The setting, as the user knows it: the pattern, or ``the whole layer``."""
    action: str
    """What it asked for: ``recompute``, ``swap(10)``, ``keep``, ``re-issue collective`` …"""
    layers: tuple[int, ...]
    """In which layers."""
    reason: str
    """Why it had none."""
    kind: Literal["unmatched", "overruled"]
    """``unmatched`` settings name nothing that exists; ``overruled`` ones lost to another."""
    nearest: tuple[str, ...] = ()
    """For unmatched patterns: the names that look most like it."""
    builtin: bool = False
    """Whether the pattern is a default of the grammar."""

    def __str__(self) -> str:
        where = f"layer{'s' * (len(self.layers) > 1)} {format_layers(self.layers)}"
        hint = f"; did you mean {' or '.join(self.nearest)}?" if self.nearest else ""
        return f"{self.setting} ({self.action}) has no effect in {where}: {self.reason}{hint}"


class Setting(NamedTuple):
    """A setting that names something, and what it did in those layers where it did the same."""

    setting: str
    """As in :class:`Unused`; also ``the layer's input``."""
    action: str
    """What it asks for, as in :class:`Unused`."""
    layers: tuple[int, ...]
    """In which layers."""
    operators: tuple[str, ...]
    """The operators it names, by their own names."""
    decided: tuple[str, ...]
    """Those of them whose decision is due to it: no other setting overrules it."""


class ResolvedLayer(NamedTuple):
    """The decisions of one layer, operator by operator."""

    decisions: Mapping[str, Decision]
    """Every operator of the layer, in order, with its one decision; prefetches count operators."""
    boundary: Keep | Swap
    """The decision for the layer's input."""
    reissued_collectives: tuple[str, ...] = ()
    """Operators whose collective is re-issued in backward."""
    kept_collectives: tuple[str, ...] = ()
    """Operators whose collective's result is kept even where the layer is recomputed."""


class Resolution(NamedTuple):
    """A Policy applied to a catalogue."""

    layers: tuple[ResolvedLayer, ...]
    unused: tuple[Unused, ...]
    """Every setting that had no effect."""
    settings: tuple[Setting, ...] = ()
    """Every setting that names something."""

    @property
    def unmatched(self) -> tuple[Unused, ...]:
        """The settings that name nothing in the model and are mistakes.

        A built-in pattern counts only if none of its siblings matches either: dense layers have no
        shared experts.
        """
        return tuple(item for item in self.unused if item.kind == "unmatched")

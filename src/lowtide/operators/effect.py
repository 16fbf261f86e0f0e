"""What a Policy does to a model's memory: the bytes that each setting frees between forward and backward.

Operators that are recomputed together free more or less than each alone: what one produced need not be held for the
rebuild of another, and what several are rebuilt from is held once. So bytes are counted for a set of operators.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from lowtide.operators.kinds import LayerKind
from lowtide.operators.survey import Survey
from lowtide.policy import Keep, Recompute, Resolution, ResolvedLayer, Setting, Swap

__all__ = ["Effect", "SettingEffect", "effect_of", "freed_by_recompute", "freed_by_swap"]


class SettingEffect(NamedTuple):
    """What one setting does to memory."""

    setting: Setting
    """The setting, and the operators it names and decides."""
    freed: int
    """The bytes it frees by itself, all its layers together. Zero or negative: it saves nothing."""
    idle: tuple[str, ...]
    """The operators that hold something, are recomputed due to it, and save nothing: what they are rebuilt from is as
    large as what they hold."""
    kept: tuple[str, ...]
    """The operators that were to be recomputed due to it and are kept, since their call cannot be replayed."""


class Effect(NamedTuple):
    """What a Policy does to a model's memory."""

    settings: tuple[SettingEffect, ...]
    """Setting by setting."""
    recomputed: int
    """The bytes that recomputing frees, all settings together."""
    swapped: int
    """The bytes that swapping takes off the device."""
    held: int
    """The bytes held for backward without the Policy, weights not counted."""

    @property
    def freed(self) -> int:
        """All bytes freed."""
        return self.recomputed + self.swapped


def effect_of(resolution: Resolution, found: Survey) -> Effect:
    """The bytes that a Policy, resolved against ``found.catalogue``, frees."""
    parts = [(found.kinds[kind], layer) for kind, layer in zip(found.kind_of, resolution.layers, strict=True)]
    return Effect(
        tuple(_setting(setting, found, resolution) for setting in resolution.settings),
        sum(freed_by_recompute(kind, _decided(layer, Recompute)) for kind, layer in parts),
        sum(freed_by_swap(kind, _decided(layer, Swap)) + _boundary(kind, layer) for kind, layer in parts),
        found.held.total - found.held.static,
    )


def freed_by_recompute(kind: LayerKind, names: Collection[str]) -> int:
    """The bytes that recomputing the operators ``names`` of one layer together frees.

    What they hold, less what is held only to rebuild it. An operator whose call cannot be replayed is kept.
    """
    chosen = {operator.name for operator in kind.operators if operator.name in names and operator.repeatable}
    dropped = _storages(kind, chosen)
    held = {pack.storage for pack in kind.packs} - set(dropped)
    extra: dict[int, int] = {}
    seen = {pack.owner for pack in kind.packs if pack.storage in dropped}
    needed = list(seen)
    while needed:
        name = needed.pop()
        for number, size in (given for call in kind.calls if call.name == name for given in call.inputs):
            owner = kind.owners.get(number, "")
            if number in held:
                continue
            if owner not in chosen:
                extra[number] = size
            elif owner not in seen:  # it is rebuilt as well
                seen.add(owner)
                needed.append(owner)
    return sum(dropped.values()) - sum(extra.values())


def freed_by_swap(kind: LayerKind, names: Collection[str]) -> int:
    """The bytes that the operators ``names`` of one layer hold, and that swapping them takes off the device."""
    return sum(_storages(kind, names).values())


def _setting(setting: Setting, found: Survey, resolution: Resolution) -> SettingEffect:
    kinds = [found.kinds[found.kind_of[layer]] for layer in setting.layers]
    layer = resolution.layers[setting.layers[0]]
    if setting.setting == "the layer's input":
        return SettingEffect(setting, sum(kind.boundary for kind in kinds), (), ())
    decisions = {type(layer.decisions[name]) for name in setting.decided}
    if "collective" in setting.action or not decisions & {Recompute, Swap}:
        return SettingEffect(setting, 0, (), ())
    if Swap in decisions:
        return SettingEffect(setting, sum(freed_by_swap(kind, setting.decided) for kind in kinds), (), ())
    distinct = list({kind.digest: kind for kind in kinds}.values())
    return SettingEffect(
        setting,
        sum(freed_by_recompute(kind, setting.decided) for kind in kinds),
        tuple(dict.fromkeys(name for kind in distinct for name in _idle(kind, setting.decided))),
        tuple(dict.fromkeys(name for kind in distinct for name in _kept(kind, setting.decided))),
    )


def _idle(kind: LayerKind, names: Collection[str]) -> Iterator[str]:
    """The operators without which the others would free as much."""
    together = freed_by_recompute(kind, names)
    for operator in kind.operators:
        if operator.name in names and operator.owned and operator.repeatable:
            others = [name for name in names if name != operator.name]
            if freed_by_recompute(kind, others) >= together:
                yield operator.name


def _kept(kind: LayerKind, names: Collection[str]) -> Iterator[str]:
    for operator in kind.operators:
        if operator.name in names and operator.owned and not operator.repeatable:
            yield operator.name


def _storages(kind: LayerKind, names: Collection[str]) -> dict[int, int]:
    return {
        pack.storage: pack.storage_bytes
        for pack in kind.packs
        if pack.movable and pack.source == "operator" and pack.owner in names
    }


def _decided(layer: ResolvedLayer, decision: type[Recompute] | type[Swap]) -> list[str]:
    return [name for name, one in layer.decisions.items() if isinstance(one, decision)]


def _boundary(kind: LayerKind, layer: ResolvedLayer) -> int:
    return kind.boundary if not isinstance(layer.boundary, Keep) else 0

"""Make a plan that fits faster, step by step, with the simulator as the judge.

The solver's model of memory is coarse where a budget is tight: what the allocator loses and what a replay needs
temporarily is as large as what is decided. The simulator knows, and a simulation takes a few milliseconds. So operators
are kept again: from those whose recompute costs most per byte, as many at a time as still fit. Swaps that are waited
for are reloaded sooner, or recomputed. Expensive operators are exchanged for several cheap ones. Every step that is
taken fits and is faster, so it ends, and always with the same Policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from lowtide.planner.problem import LayerCost
from lowtide.policy import Decision, Keep, LayerPolicy, Pattern, Policy, Recompute, Rule, Swap, resolve
from lowtide.trace.trace import Trace

__all__ = ["Judged", "Polisher"]

FACTORS = (1.5, 0.67, 2.5)
"""What prefetches are multiplied with, to see whether that is better."""
STEPS = 24
"""In how many steps the operators that may be recomputed are added."""
NEARLY = 1 - 1e-9
"""A step has to be faster by more than rounding."""
SHARES = (0.75, 0.5, 0.25, 0.0)
"""How many of a layer's operators are kept, the most expensive first, where it is no longer recomputed as a whole."""


class Judged(NamedTuple):
    """What the simulator says of a Policy."""

    seconds: float
    reserved: int
    stall: float
    """Seconds that compute waits for copies."""


class _Place(NamedTuple):
    """An operator of a layer, and what recomputing it takes."""

    layer: int
    name: str
    held: int
    seconds: float

    @property
    def cost_per_byte(self) -> float:
        """Seconds of recompute for each byte that it frees."""
        return self.seconds / self.held


_Layer: TypeAlias = tuple[tuple[str, Decision], ...] | None
"""The operators of a layer that are not kept; None for a layer that is recomputed as a whole."""
_State: TypeAlias = tuple[tuple[_Layer, LayerPolicy], ...]
"""Every layer, and the settings that it came from: the decision for its input does not change."""


class Polisher:
    """Improves Policies of one Trace under one budget; what was judged once is known."""

    def __init__(
        self,
        trace: Trace,
        costs: Sequence[LayerCost],
        judge: Callable[[Policy], Judged],
        budget: int,
        *,
        swap: bool = False,
    ) -> None:
        self.trace, self.budget, self._judge, self.swap = trace, budget, judge, swap
        self.places = {
            (layer, one.name): _Place(layer, one.name, one.held, one.seconds)
            for layer, part in enumerate(trace.layers)
            for one in costs[part].operators
            if one.held and one.repeatable
        }
        self.known: dict[_State, Judged] = {}
        self.left = 0
        self.state: _State = ()
        self.judged = Judged(0.0, 0, 0.0)

    def judge(self, state: _State) -> Judged:
        """What the simulator says of a state."""
        found = self.known.get(state)
        if found is None:
            self.left -= 1
            found = self.known[state] = self._judge(_policy(state))
        return found

    def seconds(self, policy: Policy) -> float:
        """What a Policy takes; those that do not fit take forever."""
        judged = self.judge(self._state(policy))
        return judged.seconds if judged.reserved <= self.budget else float("inf")

    def cheapest_first(self, before: Policy | None = None, *, alone: bool = False) -> Policy | None:
        """The fewest operators that fit, those that take least time for each byte first; None if no number does.

        They are recomputed in addition to what ``before`` decides. ``alone`` takes only those that save memory when
        they alone are recomputed, by the bytes that they then save.
        """
        net = {
            (layer, one.name): one.net
            for layer, part in enumerate(self.trace.layers)
            for one in self.trace.parts[part].operators
        }
        base = self._state(before or Policy((LayerPolicy(),) * len(self.trace.layers)))
        decided = {(index, name) for index, (layer, _) in enumerate(base) for name, _ in layer or ()}
        chosen = [
            place
            for place in self.places.values()
            if place[:2] not in decided and base[place.layer][0] is not None and (not alone or net[place[:2]] > 0)
        ]

        def cost_per_byte(place: _Place) -> float:
            return place.seconds / (net[place[:2]] if alone else place.held)

        order = sorted(chosen, key=lambda place: (cost_per_byte(place), place.layer, place.name))

        def state(count: int) -> _State:
            names: list[list[tuple[str, Decision]]] = [[] for _ in base]
            for place in order[:count]:
                names[place.layer].append((place.name, Recompute()))
            return tuple(
                (layer if layer is None else (*layer, *more), settings)
                for (layer, settings), more in zip(base, names, strict=True)
            )

        # More is not always less: what is rebuilt together is there together. So the whole range is looked at first.
        counts = sorted({len(order) * step // STEPS for step in range(STEPS + 1)})
        fitting = [count for count in counts if self.judge(state(count)).reserved <= self.budget]
        if not fitting:
            return None
        high = min(fitting, key=lambda count: self.judge(state(count)).seconds)
        low = max((count for count in counts if count < high), default=-1) + 1
        while low < high:
            middle = (low + high) // 2
            if self.judge(state(middle)).reserved <= self.budget:
                high = middle
            else:
                low = middle + 1
        return _policy(state(high))

    def polish(self, policy: Policy, evaluations: int) -> tuple[Policy, Judged]:
        """A Policy that fits and takes no longer than ``policy``, if that fits; itself if there is none."""
        self.left = evaluations
        self.state = self._state(policy)
        self.judged = self.judge(self.state)
        if self.judged.reserved > self.budget:
            return policy, self.judged
        before = float("inf")
        while self.left > 0 and self.judged.seconds < before * (1 - 1e-6):
            before = self.judged.seconds
            self._open_wholes()
            if self.judged.stall:
                self._tune_prefetch()
                self._recompute_instead()
            self._keep_again()
            self._exchange()
            self._swap_instead()
        return _policy(self.state), self.judged

    def _offer(self, changed: dict[int, _Layer]) -> bool:
        """Take a change of some layers if it fits and is faster."""
        state = tuple((changed[index], one[1]) if index in changed else one for index, one in enumerate(self.state))
        judged = self.judge(state)
        if judged.reserved > self.budget or judged.seconds >= self.judged.seconds * NEARLY:
            return False
        self.state, self.judged = state, judged
        return True

    def _open_wholes(self) -> None:
        """Layers that are recomputed as a whole recompute single operators instead: the expensive ones are kept."""
        for share in SHARES:
            size = len(self.state)
            while size and self.left > 0:
                whole = [index for index, (layer, _) in enumerate(self.state) if layer is None]
                size = min(size, len(whole))
                opened: dict[int, _Layer] = {}
                for index in whole[len(whole) - size :]:  # the last ones: their backward comes first
                    mine = [one for one in self.places.values() if one.layer == index]
                    mine.sort(key=lambda one: one.cost_per_byte)
                    cheap = mine[: round(len(mine) * (1 - share))]
                    opened[index] = tuple((one.name, Recompute()) for one in cheap)
                if size and not self._offer(opened):
                    size //= 2

    def _keep_again(self) -> None:
        """Keep what was recomputed or swapped, the most expensive per byte first, as many at a time as fit."""
        places = sorted(self._decided(), key=lambda place: (-place.cost_per_byte, place.layer))
        start, size = 0, max(1, len(places) // 2)
        while start < len(places) and self.left > 0:
            if self._offer(self._changed({one[:2]: None for one in places[start : start + size]})):
                start += size
                size *= 2
            elif size > 1:
                size //= 2
            else:
                start += 1

    def _tune_prefetch(self) -> None:
        """Reload swaps sooner or later, and free their memory later or sooner: all of them, then by operator."""
        names = [None, *dict.fromkeys(name for layer, _ in self.state for name, one in layer or () if _is_swap(one))]
        for name in names:
            for factor in FACTORS:
                while self.left > 0 and self._offer(self._with_prefetch(name, factor)):
                    pass

    def _with_prefetch(self, name: str | None, factor: float) -> dict[int, _Layer]:
        changed: dict[int, _Layer] = {}
        for index, (layer, _) in enumerate(self.state):
            found = tuple(
                (one, replace(what, prefetch=max(1, round(what.prefetch * factor))))
                if isinstance(what, Swap) and name in (None, one)
                else (one, what)
                for one, what in layer or ()
            )
            if layer is not None and found != layer:
                changed[index] = found
        return changed

    def _recompute_instead(self) -> None:
        """Where copies are waited for, recompute what is cheapest of the swapped instead, as many at a time as help."""
        swapped = [
            self.places[index, name]
            for index, (layer, _) in enumerate(self.state)
            for name, one in layer or ()
            if _is_swap(one) and (index, name) in self.places
        ]
        places = sorted(swapped, key=lambda place: (place.cost_per_byte, -place.layer))
        start, size = 0, max(1, len(places) // 4)
        while start < len(places) and self.left > 0:
            if self._offer(self._changed({one[:2]: Recompute() for one in places[start : start + size]})):
                start += size
            elif size > 1:
                size //= 2
            else:
                start += 1

    def _swap_instead(self) -> None:
        """Where the link has time left, swap the most expensive of the recomputed instead, as many at a time as
        help."""
        swaps = sorted(one.prefetch for layer, _ in self.state for _, one in layer or () if isinstance(one, Swap))
        if not self.swap or not swaps:
            return
        decision = Swap(swaps[len(swaps) // 2])
        places = [
            place
            for place in self._decided()
            if isinstance(dict(self.state[place.layer][0] or ())[place.name], Recompute)
        ]
        places.sort(key=lambda place: (-place.cost_per_byte, place.layer))
        start, size = 0, max(1, len(places) // 4)
        while start < len(places) and self.left > 0:
            if self._offer(self._changed({one[:2]: decision for one in places[start : start + size]})):
                start += size
            elif size > 1:
                size //= 2
            else:
                start += 1

    def _exchange(self) -> None:
        """Keep an expensive operator and recompute cheap ones of at least its bytes instead."""
        for place in sorted(self._decided(), key=lambda place: (-place.seconds, place.layer)):
            if self.left <= 0:
                return
            decided = {one[:2] for one in self._decided()}
            kept = [
                one for one in self.places.values() if one[:2] not in decided and self.state[one.layer][0] is not None
            ]
            changes: dict[tuple[int, str], Decision | None] = {place[:2]: None}
            gained, lost = 0, 0.0
            for one in sorted(kept, key=lambda one: (one.cost_per_byte, one.layer)):
                if gained >= place.held or lost >= place.seconds:
                    break
                changes[one[:2]] = Recompute()
                gained, lost = gained + one.held, lost + one.seconds
            if gained >= place.held and lost < place.seconds:
                self._offer(self._changed(changes))

    def _decided(self) -> Iterable[_Place]:
        """The operators that are not kept, in layers that are not recomputed as a whole."""
        return [
            self.places[index, name]
            for index, (layer, _) in enumerate(self.state)
            for name, _ in layer or ()
            if (index, name) in self.places
        ]

    def _changed(self, changes: dict[tuple[int, str], Decision | None]) -> dict[int, _Layer]:
        """The layers in which something is decided otherwise; None keeps an operator."""
        found: dict[int, dict[str, Decision]] = {}
        for (index, name), decision in changes.items():
            layer = found.setdefault(index, dict(self.state[index][0] or ()))
            if decision is None:
                layer.pop(name, None)
            else:
                layer[name] = decision
        return {index: tuple(layer.items()) for index, layer in found.items()}

    def _state(self, policy: Policy) -> _State:
        resolved = resolve(policy, self.trace.catalogue, require_match=False).layers
        return tuple(
            (None, settings)
            if isinstance(settings.default, Recompute)
            else (
                tuple((name, one) for name, one in layer.decisions.items() if not isinstance(one, Keep)),
                LayerPolicy(boundary=layer.boundary),
            )
            for settings, layer in zip(policy.layers, resolved, strict=True)
        )


def _is_swap(decision: Decision) -> bool:
    return isinstance(decision, Swap)


def _policy(state: _State) -> Policy:
    made: dict[tuple[_Layer, LayerPolicy], LayerPolicy] = {}
    for layer, before in state:
        if (layer, before) in made:
            continue
        if layer is None:
            made[layer, before] = before
            continue
        rules = tuple(Rule(Pattern(name), decision) for name, decision in layer)
        boundary = Keep() if isinstance(before.default, Recompute) else before.boundary
        made[layer, before] = LayerPolicy(rules=rules, boundary=boundary)
    return Policy(tuple(made[one] for one in state), origin="solver")

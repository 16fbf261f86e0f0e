"""From counts to a Policy: which layers recompute and swap what, and how far ahead each swap is reloaded.

[Note: which layers]
Layers that are recomputed as a whole come first in their chunk; the last layers, whose backward comes first, keep
most. Of the layers between, the first ones recompute an operator (see [Note: counts] in :mod:`lowtide.planner.solve`).
Swaps go where the link is least busy so far, early layers first: a copy out then has all of the forward that follows.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, TypeAlias

from lowtide.planner.problem import LayerCost, StageProblem, Storage
from lowtide.planner.solve import GroupCounts, StageSolution
from lowtide.policy import Decision, Keep, LayerPolicy, Pattern, Policy, Recompute, Rule, Swap

__all__ = ["Choice", "choices_of", "exact_text", "expand", "layer_policy", "prefetch_distances"]

BOUNDARY = ""
"""The layer's input, among the names of operators."""
FURTHEST = 3
"""No swap is reloaded more layers ahead than this."""
What: TypeAlias = Literal["recompute", "swap"]


@dataclass
class Choice:
    """What one layer does."""

    cost: LayerCost
    whole: bool = False
    """Whether it is recomputed as a whole."""
    operators: dict[str, What] = field(default_factory=dict)
    """What becomes of operators that are not kept, and of the input."""
    pinned: Mapping[str, Decision] = field(default_factory=dict)
    """Operators that the user decided."""

    @property
    def moved(self) -> int:
        """The bytes that it swaps."""
        sizes = {one.name: one.held for one in self.cost.operators} | {BOUNDARY: self.cost.boundary}
        return sum(sizes[name] for name, what in self.operators.items() if what == "swap")

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for layers that do the same."""
        return id(self.cost), self.whole, tuple(sorted(self.operators.items())), tuple(self.pinned.items())


def expand(
    problems: Sequence[StageProblem],
    solutions: Sequence[StageSolution],
    layers: int,
) -> Policy:
    """The Policy for these counts, over ``layers`` layers; those of stages that are not given keep everything."""
    keep = LayerPolicy()
    made = dict.fromkeys(range(layers), keep)
    shared = {keep: keep}  # equal layers share one object, so they resolve once
    for problem, solution in zip(problems, solutions, strict=True):
        choices = choices_of(solution.groups)
        distances: dict[tuple[object, ...], dict[str, int]] = {}
        for chunk in sorted({counts.group.chunk for counts in solution.groups}):
            places = sorted(
                layer for counts in solution.groups if counts.group.chunk == chunk for layer in counts.group.layers
            )
            for place, found in prefetch_distances([choices[layer] for layer in places], problem).items():
                known = distances.setdefault(choices[places[place]].key, {})
                for name, distance in found.items():
                    known[name] = max(distance, known.get(name, 0))
        for layer, choice in choices.items():
            policy = layer_policy(choice, distances.get(choice.key, {}))
            made[layer] = shared.setdefault(policy, policy)
    return Policy(layers=tuple(made.values()), origin="solver")


def choices_of(groups: Iterable[GroupCounts]) -> dict[int, Choice]:
    """What each layer does. See [Note: which layers]."""
    choices: dict[int, Choice] = {}
    for counts in groups:
        cost = counts.group.cost
        whole = counts.whole + counts.whole_swapped
        for place, layer in enumerate(counts.group.layers[:whole]):
            swapped: dict[str, What] = {BOUNDARY: "swap"} if place < counts.whole_swapped else {}
            choices[layer] = Choice(cost, whole=True, operators=swapped)
        others = [Choice(cost, pinned=counts.group.pinned) for _ in counts.group.layers[whole:]]
        choices |= zip(counts.group.layers[whole:], others, strict=True)
        for name, count in counts.recomputed.items():
            for choice in others[:count]:
                choice.operators[name] = "recompute"
        sizes = {one.name: one.held for one in cost.operators} | {BOUNDARY: cost.boundary}
        swaps = {**counts.swapped, BOUNDARY: counts.boundary_swapped}
        for name in sorted(swaps, key=lambda name: (-sizes[name], name)):
            free = [choice for choice in others if name not in choice.operators]
            busy = sorted(range(len(free)), key=lambda place: (free[place].moved, place))
            for place in busy[: swaps[name]]:
                free[place].operators[name] = "swap"
    return choices


def layer_policy(choice: Choice, distances: Mapping[str, int]) -> LayerPolicy:
    """A choice as a Policy says it."""

    def decision(name: str, what: What) -> Decision:
        if name in choice.pinned:
            return choice.pinned[name]
        return Recompute() if what == "recompute" else Swap(max(1, distances.get(name, 1)))

    boundary = decision(BOUNDARY, "swap") if choice.operators.get(BOUNDARY) == "swap" else Keep()
    assert not isinstance(boundary, Recompute)
    order = {one.name: place for place, one in enumerate(choice.cost.operators)}
    rules = tuple(
        Rule(_exactly(name), decision(name, choice.operators[name]))
        for name in sorted((name for name in choice.operators if name != BOUNDARY), key=order.__getitem__)
    )
    if choice.whole:
        return LayerPolicy(default=Recompute(), boundary=boundary)
    return LayerPolicy(rules=rules, boundary=boundary)


def exact_text(name: str) -> str:
    r"""The pattern that means one operator alone: a loop's name is no expression.

    >>> print(exact_text("experts.linear[*]"))
    experts\.linear\[\*\]
    """
    return "\\.".join(map(re.escape, name.split(".")))


def _exactly(name: str) -> Pattern:
    return Pattern(name if re.fullmatch(r"[\w.]+", name) else exact_text(name))


def prefetch_distances(layers: Sequence[Choice], problem: StageProblem) -> dict[int, dict[str, int]]:
    """How many operators ahead each swap of a chunk's layers is to be reloaded, by layer and operator.

    The same number also says when, in forward, the device memory is freed; compute then waits for the copy out. So it
    is the larger of two: the operators that run until the copy out is done, with all copies before it on the link, and
    those that run while the copy back passes, with all that are needed sooner. Where the link cannot keep up it is no
    more than a few layers: the computation has to wait somewhere, and there it holds least.
    """
    furthest = FURTHEST * max(len(choice.cost.operators) for choice in layers)
    forward = [one.seconds for choice in layers for one in choice.cost.operators]
    backward = [
        one.backward + (one.seconds if choice.whole or choice.operators.get(one.name) == "recompute" else 0.0)
        for choice in layers
        for one in choice.cost.operators
    ]
    ends = list(accumulate(forward))
    # In backward time runs from the last operator to the first: begins[p] is when operator p begins.
    begins = list(accumulate(reversed(backward), initial=0.0))[:-1][::-1]
    copies = sorted(_copies(layers))
    distances: dict[int, dict[str, int]] = {}
    free = 0.0
    for first, _, layer, name, size in copies:
        free = max(free, ends[first]) + size / problem.link_out + problem.copy_latency
        freed = bisect_left(ends, free)
        found = distances.setdefault(layer, {})
        found[name] = max(found.get(name, 1), min(furthest, freed - first + 1))
    free = float("inf")
    # The copy that is needed last is placed first: as late as it may be, the others before it.
    for _, last, layer, name, size in sorted(copies, key=lambda copy: copy[1]):
        free = min(free, begins[last]) - size / problem.link_in - problem.copy_latency
        start = last
        while start + 1 < len(begins) and begins[start] > free:
            start += 1
        distances[layer][name] = max(distances[layer][name], min(furthest, start - last + 1))
    return distances


def _copies(layers: Sequence[Choice]) -> Iterable[tuple[int, int, int, str, int]]:
    """For each storage that is swapped: the first and the last operator that save it, the layer, the name, bytes."""
    offset = 0
    for number, choice in enumerate(layers):
        cost = choice.cost
        swapped = {one.name: one.storages for one in cost.operators if choice.operators.get(one.name) == "swap"}
        if choice.operators.get(BOUNDARY) == "swap":
            whole = (Storage(cost.given, 0, len(cost.operators) - 1),)
            swapped[BOUNDARY] = whole if choice.whole else cost.boundary_storages
        for name, storages in swapped.items():
            for storage in storages:
                yield offset + storage.first, offset + storage.last, number, name, storage.size
        offset += len(cost.operators)

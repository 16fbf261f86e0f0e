"""How far ahead a swapped tensor is reloaded: prefetches counted in layers, converted into operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lowtide.policy.decision import Decision, Recompute, Swap
from lowtide.policy.resolution import ResolvedLayer

__all__ = ["count_in_operators"]


def count_in_operators(layers: Sequence[ResolvedLayer]) -> list[ResolvedLayer]:
    """The same layers with every prefetch in operators: k layers earlier in backward is k layers later in forward."""

    def convert(index: int) -> Callable[[Decision], Decision]:
        def one(decision: Decision) -> Decision:
            if not isinstance(decision, Swap) or decision.unit == "operators":
                return decision
            ahead = layers[index + 1 : index + 1 + decision.prefetch]
            return Swap(max(1, sum(len(layer.decisions) for layer in ahead)), decision.tier)

        return one

    result = []
    for index, layer in enumerate(layers):
        if any(isinstance(d, Swap) and d.unit == "layers" for d in (layer.boundary, *layer.decisions.values())):
            one = convert(index)
            boundary = one(layer.boundary)
            assert not isinstance(boundary, Recompute)
            decisions = {name: one(decision) for name, decision in layer.decisions.items()}
            layer = layer._replace(decisions=decisions, boundary=boundary)
        result.append(layer)
    return result

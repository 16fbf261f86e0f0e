"""Several sources mixed by weight."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from lowtide.train.data.permutation import Permutation
from lowtide.train.data.sample import Sample, Source

__all__ = ["Blend", "Repeated", "shares"]


@dataclass(frozen=True)
class Blend:
    """All samples of several sources, mixed evenly."""

    sources: tuple[Source, ...]
    """What is mixed, each with as many samples as its weight asks for."""
    seed: int = 1234
    """Decides the order."""

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(len(source) for source in self.sources))

    @cached_property
    def _order(self) -> Permutation:
        return Permutation(self._ends[-1], (self.seed, 1))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int, /) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        place = int(self._order(np.array([index]))[0])
        which = bisect_right(self._ends, place)
        return self.sources[which][place - (self._ends[which - 1] if which else 0)]


@dataclass(frozen=True)
class Repeated:
    """A source several times over."""

    source: Source
    """What is repeated."""
    times: int
    """How often."""

    def __len__(self) -> int:
        return len(self.source) * self.times

    def __getitem__(self, index: int, /) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.source[index % len(self.source)]


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers that add up to ``total``, in proportion to the weights as nearly as can be.

    >>> shares(10, [0.5, 0.25, 0.25])
    [5, 3, 2]
    """
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(one) for one in exact]
    largest_rest = sorted(range(len(weights)), key=lambda which: counts[which] - exact[which])
    for which in largest_rest[: total - sum(counts)]:
        counts[which] += 1
    return counts

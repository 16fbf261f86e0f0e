"""A permutation of any size that is computed number by number, so that nothing grows with the data."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

__all__ = ["Permutation"]

ROUNDS = 6  # four make a Feistel network look random; small domains want a few more
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True)
class Permutation:
    """The numbers below ``size`` in an order that ``key`` decides; the same key gives the same order everywhere.

    A Feistel network permutes the next power of four; what falls outside is sent through it again until it is inside.

    >>> sorted(Permutation(5, (1, 2))(np.arange(5)).tolist())
    [0, 1, 2, 3, 4]
    """

    size: int
    """How many numbers there are."""
    key: tuple[int, ...]
    """What decides the order, such as a seed and an epoch."""

    @cached_property
    def _half(self) -> np.uint64:
        """Bits of one half of a number."""
        return np.uint64(max(1, ((self.size - 1).bit_length() + 1) // 2))

    @cached_property
    def _keys(self) -> npt.NDArray[np.uint64]:
        digest = hashlib.blake2b(repr(self.key).encode(), digest_size=8 * ROUNDS).digest()
        return np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def __call__(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The numbers at these positions."""
        if self.size < 2:
            return np.zeros_like(positions)
        result = self._through(positions.astype(np.uint64))
        limit = np.uint64(self.size)
        while (outside := result >= limit).any():
            result[outside] = self._through(result[outside])
        return result.astype(np.int64)

    def _through(self, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        half = self._half
        mask = (np.uint64(1) << half) - np.uint64(1)
        left, right = numbers >> half, numbers & mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right + key) & mask)
        return (left << half) | right


def _mixed(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Every bit of the result depends on every bit of the value (splitmix64's finish)."""
    value = (value ^ (value >> np.uint64(30))) * _FIRST
    value = (value ^ (value >> np.uint64(27))) * _SECOND
    return value ^ (value >> np.uint64(31))

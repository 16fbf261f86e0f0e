"""Samples made from their number alone: no file, and a loss that goes down."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lowtide.errors import ConfigError
from lowtide.train.data.sample import Sample, sample_of

__all__ = ["Synthetic"]

STATES = 256
"""Tokens that occur at most: few enough that a model has seen them all after some steps."""


@dataclass(frozen=True)
class Synthetic:
    """A noisy walk around a ring of tokens: the next token is known from the last but for the noise."""

    samples: int
    """Samples of one pass."""
    seq_length: int
    """Tokens of a sample."""
    vocab_size: int
    """Tokens are below this."""
    seed: int = 0
    """Decides the ring and all samples."""
    noise: float = 0.1
    """The share of tokens at which the walk starts again anywhere."""

    def __post_init__(self) -> None:
        if self.vocab_size < 2:
            raise ConfigError(
                f"synthetic data needs a vocabulary of at least 2 tokens, found {self.vocab_size}; "
                "set `vocab_size` of the model or of the data loader"
            )

    @cached_property
    def _ring(self) -> npt.NDArray[np.int64]:
        order = np.random.default_rng([self.seed, 0]).permutation(self.vocab_size)
        return order[:STATES].astype(np.int64)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int, /) -> Sample:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        random = np.random.default_rng([self.seed, 1, index])
        length, states = self.seq_length + 1, len(self._ring)
        start_again = random.random(length) < self.noise
        start_again[0] = True
        places = np.arange(length)
        last_start = np.maximum.accumulate(np.where(start_again, places, 0))
        walk = random.integers(states, size=length)[last_start] + places - last_start
        return sample_of(self._ring[walk % states])

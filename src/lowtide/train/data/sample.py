"""One sample of training data, and what gives samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lowtide.models.sharded_loss import LEFT_OUT

__all__ = ["LEFT_OUT", "Sample", "Source", "sample_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One sequence of tokens, and for each position the token that follows."""

    tokens: Tensor
    """int64, [sequence]."""
    labels: Tensor
    """int64, [sequence]: the next token, or ``LEFT_OUT``."""


class Source(Protocol):
    """Samples by number: always the same for a number, on every rank and in every process; picklable."""

    def __len__(self) -> int:
        """The number of samples in one pass."""

    def __getitem__(self, index: int, /) -> Sample:
        """The sample with this number, from 0."""


def sample_of(tokens: npt.NDArray[np.int64]) -> Sample:
    """A sample of ``sequence + 1`` tokens in a row."""
    whole = torch.from_numpy(tokens)
    return Sample(whole[:-1], whole[1:].clone())  # labels are edited; tokens must not change with them

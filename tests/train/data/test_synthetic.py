"""Data without files."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from lowtide.errors import ConfigError
from lowtide.train.data import Synthetic


def test_a_sample_depends_on_its_number_and_seed_alone() -> None:
    source = Synthetic(10, 32, 1000, seed=1)
    again = pickle.loads(pickle.dumps(source))
    assert torch.equal(source[7].tokens, again[7].tokens)
    assert not torch.equal(source[7].tokens, source[8].tokens)
    assert not torch.equal(source[7].tokens, Synthetic(10, 32, 1000, seed=2)[7].tokens)
    assert source[7].tokens.dtype == source[7].labels.dtype == torch.int64
    assert torch.equal(source[7].tokens[1:], source[7].labels[:-1])
    with pytest.raises(IndexError):
        source[10]


def test_the_next_token_can_be_predicted() -> None:
    """A table of which token follows which, counted in some samples, is right about nine in ten in others."""
    source = Synthetic(200, 128, 5000)
    follows = np.zeros(5000, dtype=np.int64)
    for index in range(150):
        follows[source[index].tokens.numpy()] = source[index].labels.numpy()
    right = [follows[source[index].tokens.numpy()] == source[index].labels.numpy() for index in range(150, 200)]
    assert 0.7 < np.mean(right) < 0.95  # a count of the last follower is itself wrong in one of ten


def test_a_vocabulary_of_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2 tokens"):
        Synthetic(10, 4, 1)

"""All attacks, by name."""

from __future__ import annotations

from types import ModuleType

from attacks import (
    buffers,
    checks,
    compiled,
    copies,
    graphs,
    hooks,
    loops,
    memory,
    models,
    modes,
    mutation,
    optimizers,
    out_of_memory,
    randomness,
    runs,
    signals,
    state,
    streams,
    tensors,
    transactional,
)
from attacks.harness import Attack

__all__ = ["ATTACKS", "AT_RANDOM", "CHECKS", "TRANSFORMERS"]


def _attacks_in(*nouns: ModuleType) -> dict[str, Attack]:
    return {
        found.name: found
        for noun in nouns
        for value in vars(noun).values()
        for found in (value if isinstance(value, tuple) else (value,))
        if isinstance(found, Attack)
    }


ATTACKS = _attacks_in(
    randomness,
    buffers,
    state,
    mutation,
    modes,
    hooks,
    loops,
    runs,
    graphs,
    optimizers,
    tensors,
    compiled,
    copies,
    memory,
    signals,
    transactional,
    out_of_memory,
    streams,
    models,
)

AT_RANDOM = frozenset(_attacks_in(signals))
"""Attacks at random moments: one run says little about the next, so that they are for the benchmark."""

CHECKS = _attacks_in(checks)
"""Of the runner itself; no attacks."""

TRANSFORMERS = models.CLASSES
"""Classes of transformers that attacks build; imported before the attacks are forked."""

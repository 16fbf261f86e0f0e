"""All attacks, by name."""

from __future__ import annotations

from types import ModuleType

from attacks import buffers, checks, randomness
from attacks.harness import Attack

__all__ = ["ATTACKS", "CHECKS", "NOT_YET", "TRANSFORMERS"]


def _attacks_in(*nouns: ModuleType) -> dict[str, Attack]:
    return {
        found.name: found
        for noun in nouns
        for value in vars(noun).values()
        for found in (value if isinstance(value, tuple) else (value,))
        if isinstance(found, Attack)
    }


ATTACKS = _attacks_in(randomness, buffers)

CHECKS = _attacks_in(checks)
"""Of the runner itself; no attacks."""

TRANSFORMERS: tuple[str, ...] = ()
"""Classes of transformers that attacks build; imported before the attacks are forked."""

NOT_YET: frozenset[str] = frozenset(
    {
        "python_random",
        "numpy_random",
        "numpy_generator",
        "generator_attribute",
        "generators_in_dict",
        "global_generator",
        "device_generator",
        "host_inputs_device_dropout",
        "host_layers_device_dropout",
        "many_draws",
        "step_with_own_generator",
        "repeated_step_counts",
        "repeated_step_running_mean",
        "repeated_step_module_generator",
        "repeated_step",
        "functional_batch_norm",
        "functional_batch_norm_leaf",
        "batch_norm_unfrozen_later",
        "quantization_observers",
        "moving_average_later",
        "replaced_buffer_reversed",
        "batch_norm_reversed",
        "annealed_buffer",
        "checkpointed_batch_norm",
        "reentrant_batch_norm",
        "embedding_max_norm",
        "inference_buffer_leaf",
        "inference_buffer_model",
    }
)
"""Attacks that still break something: not run by the tests until they do not."""

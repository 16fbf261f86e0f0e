"""All attacks, by name."""

from __future__ import annotations

from types import ModuleType

from attacks import (
    buffers,
    checks,
    compiled,
    copies,
    hooks,
    loops,
    memory,
    models,
    modes,
    mutation,
    optimizers,
    out_of_memory,
    randomness,
    signals,
    state,
    streams,
    tensors,
    transactional,
)
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


ATTACKS = _attacks_in(
    randomness,
    buffers,
    state,
    mutation,
    modes,
    hooks,
    loops,
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

CHECKS = _attacks_in(checks)
"""Of the runner itself; no attacks."""

TRANSFORMERS = models.CLASSES
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
        "counter_in_list",
        "counter_attribute",
        "counter_global",
        "mean_attribute",
        "mutable_dataclass",
        "mutable_dict",
        "list_argument",
        "attribute_number",
        "attribute_tensor",
        "attribute_list",
        "attribute_config",
        "attribute_dict",
        "data_clamp",
        "static_input",
        "residual_in_place",
        "toggled_gradients",
        "written_parameter",
        "attention_backend",
        "default_dtype",
        "device_around_forward",
        "default_device",
        "default_device_host_layers",
        "dispatch_mode",
        "function_mode",
        "rounding_hooks",
        "no_grad_inside",
        "backend_flags",
        "backward_hooks",
        "scheduler_inside",
        "scheduler_before",
        "scaler_disabled",
        "gan",
        "adapt_twice",
        "never_called",
        "plan_does_not_fit",
        "saved_every_step",
        "raises_in_backward_inside",
        "forward_mode",
        "accumulated_with_graph",
        "second_optimizer",
        "second_optimizer_early",
        "both_optimizers",
        "no_optimizer",
        "wrapped_optimizer",
        "displaced_step",
        "embedding_on_host",
        "moved_later",
        "sparse_coo",
        "sparse_csr",
        "vmap",
        "jvp",
        "cond",
        "functional_call",
        "formula_rrelu",
        "formula_prod",
        "compiled_function_eager",
        "compiled_function_aot_eager",
        "compiled_leaf_eager",
        "compiled_leaf_aot_eager",
        "compiled_layers_eager",
        "compiled_layers_aot_eager",
        "saved_and_loaded",
        "shallow_copy",
        "signature",
        "dropped_graph",
        "long_run",
        "apply_sealed_layer",
        "adapt_other_policy",
        "adapt_no_optimizer",
        "adapt_sealed_layer",
        "tight_90",
        "tight_75",
        "tight_60",
        "tight_50",
        "written_before_6",
        "written_before_13",
        "written_before_18",
    }
)
"""Attacks that still break something: not run by the tests until they do not."""

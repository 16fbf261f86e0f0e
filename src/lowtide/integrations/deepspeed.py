"""The engine that ``deepspeed.initialize`` returns.

Its ZeRO optimizers step their inner optimizer once for each group of parameters, so that ``engine.step()`` ends a step,
where gradients are not only accumulated. A step cannot be retried: the engine reduces and partitions gradients while
backward runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowtide.adaptive.session import Adaptive
from lowtide.errors import PolicyError
from lowtide.integrations.attachment import Attachment
from lowtide.policy import Decision, LayerPolicy, Policy, Recompute
from lowtide.runtime.apply import policy_of

__all__ = ["adapt_engine", "attach", "is_engine"]


def is_engine(model: Any) -> bool:
    """Whether a model is an engine of DeepSpeed; it is not imported for this."""
    return any(kind.__module__ == "deepspeed.runtime.engine" for kind in type(model).__mro__)


def attach(engine: Any, attachment: Attachment) -> Attachment:
    """Attach to an engine. See :func:`lowtide.attach`."""
    if attachment.settings.policy is not None:
        _refuse(engine, policy_of(attachment.settings.policy))
        attachment.apply_policy(engine.module)
    else:
        adapt_engine(engine, attachment)
    return attachment


def _refuse(engine: Any, policy: Policy | None) -> None:
    """PolicyError where something would be recomputed with parameters that ZeRO-3 has partitioned by then.

    A layer that is recomputed as a whole is called as a module, so that its parameters are gathered. On several ranks
    they are partitioned again before its backward: that of its matrix products then finds empty weights.
    """
    if engine.zero_optimization_stage() < 3:
        return
    layers = () if policy is None else policy.layers
    recomputed = [one for one in layers if Recompute in map(type, _decisions(one))]
    if policy is None or any(one.rules for one in recomputed):
        raise PolicyError(
            "ZeRO-3 partitions parameters, and an operator that is recomputed by itself does not gather them: attach"
            " with policy=…, one that recomputes whole layers or swaps, or use ZeRO-2"
        )
    if recomputed and engine.dp_world_size > 1:
        raise PolicyError(
            "ZeRO-3 on several ranks frees a recomputed layer's parameters before its backward: attach with a"
            " Policy that swaps, or use ZeRO-2, or the model's own gradient_checkpointing_enable() without lowtide"
        )


def _decisions(layer: LayerPolicy) -> list[Decision]:
    return [layer.default, *(rule.decision for rule in layer.rules)]


def adapt_engine(engine: Any, attachment: Attachment) -> Adaptive | None:
    """Begin an adaptive run of an engine's model."""
    if engine.optimizer is None:
        raise PolicyError("the engine has no optimizer, so that it does not train: give initialize() the optimizer")
    _refuse(engine, None)
    run = attachment.adapt(engine.module, [engine.optimizer], ended_by_optimizers=False)
    if run is None:
        return None

    def ends_a_step(step: Callable[..., Any]) -> Callable[..., Any]:
        def engine_step(*args: Any, **kwargs: Any) -> Any:
            ends = engine.is_gradient_accumulation_boundary()
            result = step(*args, **kwargs)
            if ends:
                run.step()
            return result

        return engine_step

    attachment.override(engine, "step", ends_a_step)
    return run

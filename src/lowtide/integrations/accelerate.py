"""The ``Accelerator`` of accelerate, in a loop that the user has written.

[Note: around prepare]
``prepare`` wraps models and optimizers. A Policy is applied to the models before, an adaptive run begins after it, with
the optimizer that is inside accelerate's. The loop is the user's, so its steps cannot be retried; operators can.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lowtide.errors import PolicyError
from lowtide.integrations.attachment import Attachment
from lowtide.integrations.deepspeed import adapt_engine, is_engine
from lowtide.integrations.pairs import Pairs, has_layers

__all__ = ["attach"]


def attach(accelerator: Any, attachment: Attachment) -> Attachment:
    """Attach to an Accelerator, before ``prepare``; an adaptive run may also begin after it."""
    pairs, policy = Pairs(attachment), attachment.settings.policy
    prepared = list(vars(accelerator)["_models"])
    if policy is not None and prepared:
        raise PolicyError(
            f"the accelerator has prepared a {type(prepared[0]).__name__} already, and a Policy is applied before that:"
            " call lowtide.attach before accelerator.prepare"
        )

    def pair(found: list[Any]) -> None:
        models = [one for one in found if isinstance(one, nn.Module)]
        for engine in filter(is_engine, models):
            adapt_engine(engine, attachment)
        plain = [accelerator.unwrap_model(one) for one in models if not is_engine(one)]
        pairs.add(plain, [one for one in found if isinstance(one, Optimizer)], accelerator.scaler)

    def around_prepare(prepare: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_all(*args: Any, **kwargs: Any) -> Any:
            for model in args:
                if (
                    policy is not None
                    and isinstance(model, nn.Module)
                    and has_layers(model, attachment.settings.layers)
                ):
                    attachment.apply_policy(model)
            result = prepare(*args, **kwargs)
            if policy is None:
                pair(list(result) if isinstance(result, tuple) else [result])
            return result

        return prepare_all

    def at_end(end: Callable[..., Any]) -> Callable[..., Any]:
        def end_training() -> Any:
            attachment.stop()
            return end()

        return end_training

    attachment.override(accelerator, "prepare", around_prepare)
    attachment.override(accelerator, "end_training", at_end)
    if prepared:
        pair([*prepared, *vars(accelerator)["_optimizers"]])
    return attachment

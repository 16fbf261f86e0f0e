"""Lightning's ``Fabric``, in a loop that the user has written. As with accelerate: see [Note: around prepare]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lowtide.errors import PolicyError
from lowtide.integrations.attachment import Attachment
from lowtide.integrations.pairs import Pairs, has_layers

__all__ = ["attach"]


def attach(fabric: Any, attachment: Attachment) -> Attachment:
    """Attach to a Fabric, before its ``setup``."""
    pairs, policy = Pairs(attachment), attachment.settings.policy
    if vars(fabric).get("_models_setup"):
        raise PolicyError("the fabric has set up a model already: call lowtide.attach before fabric.setup")

    def around(setup: Callable[..., Any]) -> Callable[..., Any]:
        def set_up(*args: Any, **kwargs: Any) -> Any:
            model = args[0] if args else kwargs.get("module")
            if policy is not None and isinstance(model, nn.Module) and has_layers(model, attachment.settings.layers):
                attachment.apply_policy(model)
            found = setup(*args, **kwargs)
            if policy is None:
                parts = found if isinstance(found, tuple) else (found,)
                models: list[Any] = [one.module for one in parts if isinstance(one, nn.Module)]
                optimizers = [one for one in parts if not isinstance(one, nn.Module) and hasattr(one, "optimizer")]
                pairs.add(models, optimizers, getattr(fabric.strategy.precision, "scaler", None))
            return found

        return set_up

    for name in ("setup", "setup_module", "setup_optimizers"):
        attachment.override(fabric, name, around)
    return attachment

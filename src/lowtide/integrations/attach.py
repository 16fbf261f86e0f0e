"""``lowtide.attach``: one line for a trainer that is not ours."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lowtide.integrations.attachment import Attachment
from lowtide.integrations.settings import Settings

if TYPE_CHECKING:
    from lowtide.planner.plan import Plan
    from lowtide.policy import Policy

__all__ = ["attach", "integration"]

_TARGETS = {
    ("transformers.trainer", "Trainer"): "transformers",
    ("accelerate.accelerator", "Accelerator"): "accelerate",
    ("lightning.pytorch.trainer.trainer", "Trainer"): "lightning",
    ("pytorch_lightning.trainer.trainer", "Trainer"): "lightning",
    ("lightning.fabric.fabric", "Fabric"): "fabric",
    ("lightning_fabric.fabric", "Fabric"): "fabric",
    ("deepspeed.runtime.engine", "DeepSpeedEngine"): "deepspeed",
}
"""What can be attached to, by the module and the name of its class, and the file here that does it."""


def attach(
    target: Any,
    *,
    policy: Policy | Plan | str | Path | None = None,
    budget: int | str = "auto",
    profiling_steps: int | None = None,
    rescue: bool = True,
    watch: Literal["suspicion", "always"] = "suspicion",
    swap: bool = True,
    layers: str | None = None,
    directory: str | Path | None = None,
    verbose: bool = True,
) -> Attachment:
    """Make a framework's training fit its device: one line before the training begins.

    ``target`` is a ``Trainer`` of transformers, or one that is derived from it, such as TRL's; a ``Trainer`` or a
    ``Fabric`` of Lightning; an ``Accelerator``; or the engine that ``deepspeed.initialize`` returns. The settings are
    those of :func:`lowtide.adapt`. With ``policy`` that Policy is applied instead, and nothing is measured or planned.
    Gradient checkpointing that is on already is turned off meanwhile.

    ``lowtide.attach(trainer, budget="22GiB")``; ``trainer.train()``

    Every rank attaches, or none: a rank that waits in vain for another raises LaunchError after some minutes. The model
    and its optimizers are restored when the training ends; what is returned has ``run`` (see :func:`lowtide.adapt`) or
    ``handle`` (see :func:`lowtide.apply`) and ``remove()``. TypeError for anything else.
    """
    settings = Settings(
        policy=policy,
        budget=budget,
        profiling_steps=profiling_steps,
        rescue=rescue,
        watch=watch,
        swap=swap,
        layers=layers,
        directory=directory,
        verbose=verbose,
    )
    settings.check()
    return integration(target)(target, Attachment(settings))


def integration(target: Any) -> Callable[[Any, Attachment], Attachment]:
    """What attaches to an object of this class. TypeError if nothing does."""
    for kind in type(target).__mro__:
        if file := _TARGETS.get((kind.__module__, kind.__qualname__)):
            found: Callable[[Any, Attachment], Attachment] = import_module(f"lowtide.integrations.{file}").attach
            return found
    names = "a Trainer of transformers or TRL, an Accelerator, a Trainer or Fabric of Lightning, a DeepSpeedEngine"
    hint = ""
    if any(kind.__module__ == "torch.nn.modules.module" for kind in type(target).__mro__):
        hint = "; for a model in a loop of your own use lowtide.adapt(model, optimizer) or lowtide.apply(model, policy)"
    raise TypeError(f"attach() takes {names}; found {type(target).__module__}.{type(target).__qualname__}{hint}")

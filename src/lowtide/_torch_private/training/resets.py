"""What DDP, FSDP and pipelining remember of a step that was broken off, and how each forgets it."""

from __future__ import annotations

from typing import Any

import torch

from lowtide._torch_private.needed import needed_for

__all__ = [
    "drop_pipeline_losses",
    "reset_reducer",
    "reset_sharding",
]


def reset_reducer(module: torch.nn.parallel.DistributedDataParallel) -> None:
    """Let DDP forget a backward that was broken off; otherwise the next forward is refused."""
    with needed_for("repeating a step under DistributedDataParallel"):
        reset = module.reducer._reset_state
    reset()


def drop_pipeline_losses(schedule: Any) -> None:
    """Let a pipeline schedule forget the losses of a step that was broken off; they would count for the next one."""
    with needed_for("repeating a step of a pipeline"):
        losses = schedule._internal_losses
    losses.clear()


def reset_sharding(module: Any) -> None:
    """Let FSDP forget a step that was broken off; ``module`` is the root that ``fully_shard`` was called on.

    Torch's own ``reset_iter_state`` leaves the gradients of gathered parameters that were not reduced yet; the next
    backward would add to them.
    """
    module.reset_iter_state()
    with needed_for("repeating a step under fully_shard"):
        states = module._get_fsdp_state()._state_ctx.all_states
        parameters = [one for state in states for group in state._fsdp_param_groups for one in group.fsdp_params]
    for parameter in parameters:
        if "unsharded_accumulated_grad" in vars(parameter):  # since 2.15 it is the gathered parameter's gradient
            parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):  # gathered before
            parameter._unsharded_param.grad = None

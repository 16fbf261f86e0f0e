"""What DDP, FSDP and pipelining remember of a step that was broken off, and how each forgets it."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist

from lowtide._torch_private.needed import needed_for

__all__ = [
    "reset_pipeline",
    "reset_reducer",
    "reset_sharding",
    "use_group",
]


def reset_reducer(module: torch.nn.parallel.DistributedDataParallel) -> None:
    """Let DDP forget a backward that was broken off; otherwise the next forward is refused."""
    with needed_for("retrying a step under DistributedDataParallel"):
        reset = module.reducer._reset_state
    reset()


def reset_pipeline(schedule: Any) -> None:
    """Let a pipeline schedule forget a step that was broken off; all else it forgets itself when it begins.

    Its losses would count for the next step. Receive buffers that no forward or backward has taken are, since 2.15, an
    error in the next step: a receive that is still under way might write into them. They are dropped, so that the next
    receive gets its own; what is under way must not be taken for it, see :func:`use_group`.
    """
    with needed_for("retrying a step of a pipeline"):
        losses = schedule._internal_losses
        received = [one for stage in _stages_of(schedule) for one in (stage.args_recv_info, stage.grad_recv_info)]
    losses.clear()
    for by_micro_batch in received:
        for info in (one for infos in by_micro_batch.values() for one in infos):
            if hasattr(info, "take_buffer"):
                info.buffer = None
    for name in ("fwd_recv_ops", "bwd_recv_ops"):  # of schedules that post receives ahead
        getattr(schedule, name, {}).clear()


def use_group(schedule: Any, group: dist.ProcessGroup) -> None:
    """Let a pipeline's stages send and receive in another group of the same ranks.

    2.14 notes it for each direction when a stage is made, 2.15 for each pair of stages when they first meet.
    """
    for stage in _stages_of(schedule):
        for name in ("group", "_downstream_group", "_upstream_group"):
            if hasattr(stage, name):
                setattr(stage, name, group)
        if hasattr(stage, "_p2p_edge_groups"):
            stage._p2p_edge_groups.clear()


def _stages_of(schedule: Any) -> list[Any]:
    return [schedule._stage] if hasattr(schedule, "_stage") else list(schedule._stages)


def reset_sharding(module: Any) -> None:
    """Let FSDP forget a step that was broken off; ``module`` is the root that ``fully_shard`` was called on.

    Torch's own ``reset_iter_state`` leaves the gradients of gathered parameters that were not reduced yet; the next
    backward would add to them.
    """
    module.reset_iter_state()
    with needed_for("retrying a step under fully_shard"):
        states = module._get_fsdp_state()._state_ctx.all_states
        parameters = [one for state in states for group in state._fsdp_param_groups for one in group.fsdp_params]
    for parameter in parameters:
        if "unsharded_accumulated_grad" in vars(parameter):  # since 2.15 it is the gathered parameter's gradient
            parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):  # gathered before
            parameter._unsharded_param.grad = None

"""One norm of all gradients of a job, wherever their parts are, and clipping to it.

[Note: one norm] A gradient is a plain tensor or a DTensor, on any mesh. Another rank may hold the same part of it,
another part, or, on another pipeline stage, other gradients. Every rank adds up the squares of the parts it holds, each
divided by the number of ranks that hold the very same part, and one all-reduce of one number over the whole job gives
the square of the norm. So each element counts once, the number of collectives does not depend on the number of
parameters, of meshes or of ranks, and nothing waits for the device.

How many ranks hold a part: a parameter is known to all ranks of its pipeline stage. Their number is divided by each
mesh dimension that it is sharded on, and by the expert-parallel ranks for experts whose tensors do not show it. What
remains is the number of equal copies, made by data parallel or because a tensor-parallel weight is replicated.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from lowtide._torch_private.training.foreach import multiply_all, norms_of
from lowtide.errors import ConfigError, ModelError

__all__ = ["clip", "global_norm", "scale_gradients"]


@torch.no_grad()
def global_norm(
    parameters: Iterable[nn.Parameter],
    *,
    stages: int = 1,
    expert_parameters: Collection[nn.Parameter] = (),
    expert_ranks: int = 1,
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """The norm of all gradients of the job, float32 on the device and the same on every rank; see [Note: one norm].

    ``parameters`` are those of this rank, of all its model parts. ``stages`` is the number of ranks along the pipeline.
    ``expert_parameters`` are those of which each of ``expert_ranks`` ranks has others without a DTensor that says so.
    ``group`` is the whole job by default. Every rank must call it, also one without gradients.

    >>> weight = nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> global_norm([weight])
    tensor(5.)
    """
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    experts = {id(one) for one in expert_parameters}
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            continue
        device = device or parameter.grad.device
        shards = _shards(parameter) * (expert_ranks if id(parameter) in experts else 1)
        copies, rest = divmod(ranks // stages, shards)
        if rest or not copies:
            raise ModelError(
                f"a parameter of shape {tuple(parameter.shape)} is sharded into {shards} parts, on {ranks} ranks with "
                f"{stages} pipeline stages; expected a number of parts that divides {ranks // stages}: check `stages`, "
                "`expert_ranks` and `group`"
            )
        by_copies.setdefault(copies, []).append(_reduced(parameter))
    total = torch.zeros((), dtype=torch.float32, device=device)
    for copies, gradients in by_copies.items():
        total += torch.stack(norms_of(gradients)).square().sum() / copies
    if set(by_copies) == {ranks}:
        return (total * ranks).sqrt()  # every rank has all gradients, the same ones
    if ranks > 1:
        dist.all_reduce(total, group=group)
    return total.sqrt()


def clip(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients down so that their norm, now ``norm``, is at most ``max_norm``; as torch does.

    The factor is ``max_norm / (norm + 1e-6)`` and never above 1.
    """
    if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)) or not 0 < max_norm < math.inf:
        raise ConfigError(f"`max_grad_norm` must be a number above 0, found {max_norm!r}; write 1.0")
    scale_gradients(parameters, torch.clamp(max_norm / (norm + 1e-6), max=1.0))


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply all gradients by a number that is on their device, in place."""
    gradients = [_local(one.grad) for one in parameters if one.grad is not None]
    if gradients:
        multiply_all(gradients, factor)


def _shards(parameter: nn.Parameter) -> int:
    """Over how many ranks a gradient is sharded, as far as the tensor shows."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return 1
    return math.prod(
        gradient.device_mesh.size(dimension)
        for dimension, placement in enumerate(gradient.placements)
        if not placement.is_replicate() and not placement.is_partial()  # other kinds of shards say no to is_shard
    )


def _reduced(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a gradient; sums that are still open are finished first, and stay so."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and any(one.is_partial() for one in gradient.placements):
        gradient = parameter.grad = gradient.redistribute(
            placements=[Replicate() if one.is_partial() else one for one in gradient.placements]
        )
    assert gradient is not None
    return _local(gradient)


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
